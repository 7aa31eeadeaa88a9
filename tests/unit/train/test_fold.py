"""A network with its batch norms folded gives the logits of the network."""

import pytest
import torch
from torch import nn

from tasks.train.features import ends_in_head
from tasks.train.fold import fold_batch_norm
from tasks.train.model import Classifier, build_classifier


def trained(name: str) -> Classifier:
    """Return a classifier whose batch norms have seen something."""
    torch.manual_seed(5)
    classifier = build_classifier(name, "none", num_classes=3, freeze_backbone=False)
    for module in classifier.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 2)
            nn.init.uniform_(module.weight, 0.5, 2)
            nn.init.normal_(module.bias, std=0.1)
    return classifier.train()


@pytest.mark.parametrize(
    ("name", "side"),
    [
        ("mobilenet_v2", 64),
        ("resnet18", 64),
        ("densenet121", 64),
        ("efficientnet_b0", 64),
        ("shufflenet_v2_x0_5", 64),
        ("googlenet", 64),
        ("inception_v3", 96),
        ("regnet_y_400mf", 64),
    ],
)
def test_logits_are_the_same(name: str, side: int) -> None:
    """Within a thousandth of their spread; the given network is as it was, in its mode and its weights."""
    classifier = trained(name)
    before = {key: value.clone() for key, value in classifier.state_dict().items()}
    pictures = torch.randint(0, 256, (4, side, side, 3), dtype=torch.uint8)

    folded = fold_batch_norm(classifier)

    assert classifier.training
    assert all(torch.equal(before[key], value) for key, value in classifier.state_dict().items())
    with torch.no_grad():
        expected, found = classifier.eval()(pictures), folded(pictures)
    assert (found - expected).abs().max() < 1e-3 * expected.std()
    norms = [sum(isinstance(m, nn.BatchNorm2d) for m in net.modules()) for net in (classifier, folded)]
    assert norms[1] < norms[0]
    if name != "densenet121":  # it normalises before it convolves: most of its norms have no convolution to go into
        assert norms[1] == 0
    assert ends_in_head(folded, pictures)


@pytest.mark.parametrize("name", ["squeezenet1_1", "vit_b_32"])
def test_a_network_without_batch_norms_stays_as_it_is(name: str) -> None:
    """In eval mode."""
    classifier = build_classifier(name, "none", num_classes=3, freeze_backbone=False)
    assert fold_batch_norm(classifier) is classifier
    assert not classifier.training
