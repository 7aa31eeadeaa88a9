"""The network: a torchvision classifier with a new head and an optionally frozen backbone."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from tasks.errors import WrongInput
from tasks.model.depthwise import speed_up_depthwise
from tasks.model.pretrained import check_model_name, default_weights, weights_digest
from tasks.model_package.network import ImageNetwork, replace_head, torchvision_network
from tasks.paths import expand_user


class Classifier(ImageNetwork):
    """A network in training, whose frozen layers stay in eval mode."""

    def __init__(self, network: nn.Module, head: nn.Module, freeze_backbone: bool) -> None:
        super().__init__(network, head)
        self._frozen: list[nn.Module] = []
        if freeze_backbone:
            self.freeze_all_but([head])

    def freeze_all_but(self, trainable: Sequence[nn.Module]) -> None:
        """Freeze all layers but these."""
        unfrozen = {id(module) for part in trainable for module in part.modules()}
        self.network.requires_grad_(False)
        for part in trainable:
            part.requires_grad_(True)
        self._frozen = [module for module in self.network.modules() if id(module) not in unfrozen]

    def unfreeze_from(self, layer: str) -> None:
        """Unfreeze the named layer and all layers that torchvision lists after it; `all` is every layer.

        Raises:
            WrongInput: The network has no such layer; the message lists its layers.
        """
        names = [name for name, _module in self.network.named_modules() if name]
        if layer != "all" and layer not in names:
            shown = [name for name in names if name.count(".") <= layer.count(".")]
            raise WrongInput(
                f"train.fine_tune.unfreeze_from is '{layer}', which is not a layer of the model",
                setting="train.fine_tune.unfreeze_from",
                way_out=f"give all, or one of {', '.join(shown)}",
            )
        if layer == "all":
            self.freeze_all_but([self.network])
            return
        begin = names.index(layer)
        self.freeze_all_but([self.network.get_submodule(name) for name in names[begin:]] + [self.head])

    def train(self, mode: bool = True) -> Self:
        """Set the mode; frozen layers stay in eval mode, so that their batch norm statistics do not change."""
        super().train(mode)
        for module in self._frozen:
            module.training = False
        return self


def copy_of_state(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy of a module's state dict, with the module versions that MNASNet needs to load it."""
    state: dict[str, torch.Tensor] = module.state_dict()
    for name, value in state.items():
        state[name] = value.detach().to("cpu", copy=True)
    return state


def copy_of_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of a module's buffers, such as batch norm's running statistics, on its device."""
    return {name: value.clone() for name, value in module.named_buffers()}


def load_buffers(module: nn.Module, buffers: Mapping[str, torch.Tensor]) -> None:
    """Give a module the values of these buffers."""
    with torch.no_grad():
        for name, value in module.named_buffers():
            value.copy_(buffers[name])


def load_weights(name: str, weights: str) -> dict[str, Any] | None:
    """Return the state dict that `weights` names, or None for 'none'.

    Raises:
        WrongInput: The file is missing or is not a state dict, or the download failed.
    """
    if weights == "none":
        return None
    if weights == "DEFAULT":
        return _load_default(name)
    path = expand_user(Path(weights))
    if not path.is_file():
        raise WrongInput(
            f"train.weights is '{weights}', which is not a file",
            setting="train.weights",
            way_out="give none, DEFAULT, or the path of a state dict",
        )
    try:
        # weights_only: a state dict is data, and an untrusted file must not run code.
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # Invalid files raise zip, pickle, key and type errors.
        raise WrongInput(
            f"train.weights is '{weights}', which is not a state dict ({type(error).__name__})",
            setting="train.weights",
            way_out="save one with torch.save(model.state_dict(), path)",
        ) from error
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise WrongInput(
            f"train.weights is '{weights}', which is not a state dict of tensors",
            setting="train.weights",
            way_out="save model.state_dict()",
        )
    return state


def _load_default(name: str) -> dict[str, Any]:
    file = Path(torch.hub.get_dir()) / "checkpoints" / weights_digest(name, "DEFAULT")
    existed = file.exists()
    try:
        # The digest is checked after a download, not for an existing file; both are loaded as data only.
        state: dict[str, Any] = default_weights(name).get_state_dict(check_hash=True, weights_only=True)
        return state
    except Exception as error:  # The digest differs, the network is down, or the file is invalid.
        if existed:
            raise WrongInput(
                f"train.weights is DEFAULT, and the file '{file}' is not a state dict ({type(error).__name__})",
                setting="train.weights",
                way_out="remove it to download it again",
            ) from None
        if not isinstance(error, OSError | RuntimeError):
            raise
        raise WrongInput(
            f"train.weights is DEFAULT and the weights of {name} could not be downloaded ({error})",
            setting="train.weights",
            way_out="set train.weights to the path of a state dict, or to none with train.freeze_backbone false",
        ) from None


def build_classifier(name: str, weights: str, num_classes: int, freeze_backbone: bool) -> Classifier:
    """Build the network with its weights and a new head of `num_classes` outputs.

    Raises:
        WrongInput: The model is unknown, or the weights do not fit it.
    """
    check_model_name(name)
    state = load_weights(name, weights)
    network = torchvision_network(name)
    if state is not None:
        _load_state(network, state, name, weights)
    head = replace_head(network, num_classes)
    speed_up_depthwise(network)
    return Classifier(network, head, freeze_backbone)


def _load_state(network: nn.Module, state: dict[str, Any], name: str, weights: str) -> None:
    expected = network.state_dict()
    missing = sorted(expected.keys() - state.keys())
    unknown = sorted(state.keys() - expected.keys())
    reshaped = sorted(key for key in expected.keys() & state.keys() if expected[key].shape != state[key].shape)
    problems = [
        f"{len(keys)} {what} (first: {keys[0]})"
        for what, keys in (("missing", missing), ("unknown", unknown), ("of another shape", reshaped))
        if keys
    ]
    if problems:
        way_out = "give the weights of this architecture, or the architecture of these weights"
        raise WrongInput.complete(
            f"train.weights is '{weights}', which does not fit train.model '{name}': of its tensors "
            f"{', '.join(problems)}; {way_out}",
            setting="train.weights",
            way_out=way_out,
        )
    network.load_state_dict(state)


def at_least_two(inputs: torch.Tensor) -> torch.Tensor:
    """Return the inputs, with a copy of a single one, or two zeros for none.

    Batch norm needs at least two values per channel, and some networks cannot pass an empty batch.
    """
    if len(inputs) == 0:
        return inputs.new_zeros((2, *inputs.shape[1:]))
    return torch.cat([inputs, inputs]) if len(inputs) == 1 else inputs
