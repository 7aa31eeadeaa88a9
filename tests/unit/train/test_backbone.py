"""Which classifiers' features stand for their images, and what tells one backbone from another."""

import torch
from torch import nn

from tasks.model.network import Classifier, build_classifier
from tasks.train.features import backbone_digest, ends_in_head
from tests.builders.small_network import SMALL


def test_the_digest_of_a_backbone_is_of_architecture_and_weights(classifier: Classifier) -> None:
    """The head is no part of it."""
    before = backbone_digest(SMALL, classifier)
    nn.init.normal_(classifier.head.weight)
    assert backbone_digest(SMALL, classifier) == before
    assert backbone_digest("other", classifier) != before
    with torch.no_grad():
        next(classifier.network.buffers()).add_(1.0)
    assert backbone_digest(SMALL, classifier) != before


def test_pooled_classifier_ends_in_its_head(classifier: Classifier) -> None:
    """The logits of a network that ends in a linear layer are its output, so that features can stand for images."""
    images = torch.randint(0, 256, (2, 32, 32, 3), dtype=torch.uint8)

    assert ends_in_head(classifier, images)
    assert not classifier.head._forward_hooks
    assert not classifier.head._forward_pre_hooks


def test_squeezenet_does_not_end_in_its_head() -> None:
    """Squeezenet applies ReLU and pooling to what its last layer gives: its features are not cached."""
    squeezenet = build_classifier("squeezenet1_1", "none", num_classes=3, freeze_backbone=True)
    images = torch.randint(0, 256, (2, 64, 64, 3), dtype=torch.uint8)

    assert not ends_in_head(squeezenet, images)
    assert not squeezenet.head._forward_hooks


def test_network_that_changes_its_head_s_output_does_not_end_in_it() -> None:
    """A ReLU behind a linear layer makes other logits than the layer, whatever its shape."""
    head = nn.Linear(12, 3)
    images = torch.randint(0, 256, (8, 2, 2, 3), dtype=torch.uint8)

    plain = Classifier(nn.Sequential(nn.Flatten(), head), head, freeze_backbone=True)
    changing = Classifier(nn.Sequential(nn.Flatten(), head, nn.ReLU()), head, freeze_backbone=True)

    assert ends_in_head(plain, images)
    assert not ends_in_head(changing, images)
