"""Classifiers whose features can replace their images, and the digest of a backbone."""

import torch
from torch import nn

from tasks.model.training_network import Classifier, build_classifier
from tasks.train.features import backbone_digest, ends_in_head
from tests.builders.small_network import SMALL


def test_backbone_digest_depends_on_architecture_and_weights(classifier: Classifier) -> None:
    """The digest changes with the architecture, weights and buffers of the backbone, but not with the head."""
    before = backbone_digest(SMALL, classifier)
    nn.init.normal_(classifier.head.weight)
    assert backbone_digest(SMALL, classifier) == before
    assert backbone_digest("other", classifier) != before
    with torch.no_grad():
        next(classifier.network.buffers()).add_(1.0)
    assert backbone_digest(SMALL, classifier) != before


def test_classifier_with_linear_last_layer_ends_in_head(classifier: Classifier) -> None:
    """The logits of a network with a linear last layer are that layer's output, and no hook is left."""
    images = torch.randint(0, 256, (2, 32, 32, 3), dtype=torch.uint8)

    assert ends_in_head(classifier, images)
    assert not classifier.head._forward_hooks
    assert not classifier.head._forward_pre_hooks


def test_squeezenet_does_not_end_in_head() -> None:
    """Squeezenet applies ReLU and pooling to the output of its last layer, so its features are not cached."""
    squeezenet = build_classifier("squeezenet1_1", "none", num_classes=3, freeze_backbone=True)
    images = torch.randint(0, 256, (2, 64, 64, 3), dtype=torch.uint8)

    assert not ends_in_head(squeezenet, images)
    assert not squeezenet.head._forward_hooks


def test_network_with_relu_after_the_head_does_not_end_in_head() -> None:
    """A ReLU after the linear layer changes the logits, although their shape is the same."""
    head = nn.Linear(12, 3)
    images = torch.randint(0, 256, (8, 2, 2, 3), dtype=torch.uint8)

    plain = Classifier(nn.Sequential(nn.Flatten(), head), head, freeze_backbone=True)
    changing = Classifier(nn.Sequential(nn.Flatten(), head, nn.ReLU()), head, freeze_backbone=True)

    assert ends_in_head(plain, images)
    assert not ends_in_head(changing, images)
