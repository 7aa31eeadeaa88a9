"""The head of every torchvision classifier, tested without memory for its weights."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torchvision
from torch.overrides import TorchFunctionMode

from tasks.model.training_network import build_classifier

CREATE_WEIGHTS = (torch.empty, torch.zeros, torch.ones)
"""Functions by which layers create their weights; torchvision creates other tensors by other functions."""

# googlenet and inception_v3 warn on every construction that their weight initialization will change.
pytestmark = pytest.mark.filterwarnings("ignore:The default weight initialization:FutureWarning")


class NoMemory(TorchFunctionMode):
    """Mode in which weights have shapes but no values: the largest network has 2.6 GB of them."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Create weights on the device `meta`."""
        options = dict(kwargs or {})
        if func in CREATE_WEIGHTS and options.get("device") is None:
            options["device"] = "meta"
        return func(*args, **options)


@pytest.mark.parametrize("name", torchvision.models.list_models(module=torchvision.models))
def test_every_classifier_of_torchvision_gets_a_head(name: str) -> None:
    """The logits have a column per class of the data, and with a frozen backbone only the head is trained."""
    with NoMemory():
        classifier = build_classifier(name, "none", num_classes=5, freeze_backbone=True).eval().to("meta")

    with torch.no_grad():
        assert classifier.network(torch.zeros(2, 3, 224, 224, device="meta")).shape == (2, 5)
    trained = [parameter for parameter in classifier.parameters() if parameter.requires_grad]
    assert [id(parameter) for parameter in trained] == [id(parameter) for parameter in classifier.head.parameters()]
    assert trained[0].shape[0] == 5
