"""Every classifier of torchvision gets a head of ours, tried without memory for its weights."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torchvision
from torch.overrides import TorchFunctionMode

from tasks.model.network import build_classifier

MADE_EMPTY = (torch.empty, torch.zeros, torch.ones)
"""What layers make their weights with; what torchvision computes with is made by others."""

# googlenet and inception_v3 say on every start that their way to draw weights will change.
pytestmark = pytest.mark.filterwarnings("ignore:The default weight initialization:FutureWarning")


class NoMemory(TorchFunctionMode):
    """Weights that are made in it have shapes and no values: the largest network has 2.6 GB of them."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Make weights on the device that has no memory."""
        given = dict(kwargs or {})
        if func in MADE_EMPTY and given.get("device") is None:
            given["device"] = "meta"
        return func(*args, **given)


@pytest.mark.parametrize("name", torchvision.models.list_models(module=torchvision.models))
def test_every_classifier_of_torchvision_gets_a_head(name: str) -> None:
    """Its logits have one column a class of ours, and with a frozen backbone the head alone learns."""
    with NoMemory():
        classifier = build_classifier(name, "none", num_classes=5, freeze_backbone=True).eval().to("meta")

    with torch.no_grad():
        assert classifier.network(torch.zeros(2, 3, 224, 224, device="meta")).shape == (2, 5)
    learning = [parameter for parameter in classifier.parameters() if parameter.requires_grad]
    assert [id(parameter) for parameter in learning] == [id(parameter) for parameter in classifier.head.parameters()]
    assert learning[0].shape[0] == 5
