"""The network that tests build: the smallest one that has what the larger ones have."""

SMALL = "shufflenet_v2_x0_5"
"""The smallest of torchvision's classifiers; it has batch norm."""
