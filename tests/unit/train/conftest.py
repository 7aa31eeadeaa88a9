"""Weights of a small network, for the tests of networks and of weights."""

from pathlib import Path

import pytest
import torch
import torchvision

from tasks.model.network import Classifier, build_classifier

SMALL = "shufflenet_v2_x0_5"
"""The smallest of torchvision's classifiers; it has batch norm."""


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state dict of SMALL, drawn at random: stands for pretrained weights."""
    torch.manual_seed(11)
    path = tmp_path_factory.mktemp("weights") / "small.pt"
    torch.save(torchvision.models.get_model(SMALL, weights=None).state_dict(), path)
    return path


@pytest.fixture
def classifier(weights: Path) -> Classifier:
    """A frozen classifier whose head prefers no class."""
    torch.manual_seed(2)
    return build_classifier(SMALL, str(weights), num_classes=3, freeze_backbone=True)
