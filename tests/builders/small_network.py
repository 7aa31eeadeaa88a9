"""The network of tests: small, with the kinds of layers of larger networks."""

SMALL = "shufflenet_v2_x0_5"
"""The smallest of torchvision's classifiers; it has batch norm."""
