"""The network: a classifier of torchvision or timm with a new head and an optionally frozen backbone."""

import logging
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import isqrt
from typing import Self

import torch
from torch import nn
from torch.nn import functional

from tasks.errors import WrongInput, join_names
from tasks.model.depthwise import speed_up_depthwise
from tasks.model.pretrained import (
    Preprocessing,
    check_model_name,
    load_weights,
    package_of,
    preprocessing,
)
from tasks.model_package.network import AUXILIARY, ImageNetwork, NoHead, last_layer, new_network, replace_head

logger = logging.getLogger("lakevision.train")

COMPILED = "_orig_mod."
"""Part of the names of tensors under a module that torch.compile has wrapped."""


class Classifier(ImageNetwork):
    """A network in training, whose frozen layers stay in eval mode.

    Attributes:
        made_for: Preprocessing of its initial weights.
    """

    def __init__(
        self,
        network: nn.Module,
        head: nn.Module,
        freeze_backbone: bool,
        made_for: Preprocessing = Preprocessing(),
    ) -> None:
        super().__init__(network, head, made_for.mean, made_for.std)
        self.made_for = made_for
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
        """Unfreeze the named layer and all layers that the network lists after it; `all` is every layer.

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

    def freeze_statistics(self) -> None:
        """Keep the statistics of batch norm, whose weights may still be trained.

        Those of the pretrained weights are better than those of a few small batches (tests/benchmarks/LOG.md).
        """
        self._frozen += [
            module for module in self.network.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)
        ]

    def train(self, mode: bool = True) -> Self:
        """Set the mode; frozen layers and statistics stay in eval mode, and do not change."""
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


def build_classifier(
    name: str,
    weights: str,
    num_classes: int,
    freeze_backbone: bool,
    classes: Sequence[str] = (),
    dropout: float | None = None,
) -> Classifier:
    """Build the network with its weights and a new head of `num_classes` outputs.

    Args:
        name: Name of the network.
        weights: As `train.weights`; a champion or run is a file already.
        num_classes: Number of classes.
        freeze_backbone: Whether only the head is trained.
        classes: Names of the classes; the head keeps the rows of those that a model package has.
        dropout: Fraction of the head's inputs that are dropped in training; None: the network's own.

    Raises:
        WrongInput: The model is unknown or has no head, or the weights do not fit it.
    """
    check_model_name(name)
    package = package_of(weights)
    if package is not None and package.model != name:
        raise WrongInput(
            f"train.weights is '{weights}', a model of '{package.model}', and train.model is '{name}'",
            setting="train.model",
            way_out=f"set train.model to '{package.model}'",
        )
    made_for = preprocessing(name, weights)
    state = load_weights(name, weights)
    side = None if state is None else _side_of(state, name)
    if side is not None:
        made_for = replace(made_for, image_size=side)
    network = new_network(name, side)
    try:
        layer = last_layer(network)
    except NoHead as error:
        raise WrongInput(
            f"train.model is '{name}', whose head cannot be replaced ({error})",
            setting="train.model",
            way_out="choose a classifier with one layer of logits",
        ) from None
    if state is not None:
        _load_state(network, state, name, weights, has_classes=package is not None)
    head = replace_head(network, num_classes)
    if dropout is not None:
        _drop_inputs(network, head, dropout)
    if package is not None and state is not None and classes:
        prefix = f"network.{layer}."
        old_head = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
        _keep_rows(head, old_head, package.classes, classes)
    speed_up_depthwise(network)
    return Classifier(network, head, freeze_backbone, made_for)


def _drop_inputs(network: nn.Module, head: nn.Module, dropout: float) -> None:
    """Drop this fraction of the head's inputs in training, in place of the network's dropout beside the head.

    As a hook of the head, which has the same names of weights, and drops cached features, too.
    """
    parents = [module for module in network.modules() if any(child is head for child in module.children())]
    for module in parents[0].children():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    head.register_forward_pre_hook(
        lambda module, inputs: (functional.dropout(inputs[0], dropout, module.training), *inputs[1:])
    )


def _side_of(state: Mapping[str, torch.Tensor], name: str) -> int | None:
    """Return the side, in pixels, of the images of the weights of a vision transformer of torchvision, else None."""
    found = [value.shape for key, value in state.items() if key.endswith("encoder.pos_embedding")]
    if not name.startswith("vit_") or len(found) != 1 or len(found[0]) != 3:
        return None
    patch = int(name.rpartition("_")[2])  # vit_h_14 has patches of 14 pixels; one token is of the class.
    return isqrt(max(found[0][1] - 1, 1)) * patch


def _keep_rows(
    head: nn.Module, rows: Mapping[str, torch.Tensor], before: Sequence[str], classes: Sequence[str]
) -> None:
    """Give a new head the rows of the classes that the head of a model package has as well, by their names.

    Args:
        head: The new head.
        rows: Weight and bias of the head of the package.
        before: Its classes.
        classes: Those of the new head.
    """
    for part, values in head.named_parameters():
        old = rows.get(part)
        if old is None or old.shape != (len(before), *values.shape[1:]) or not _is_valid(part, old):
            logger.warning("the head of the initial model does not fit, and a new one is trained")
            return
    from tasks.text.forms import as_known  # Here: most ranks need no other form of a label.

    numbers = {label: number for number, label in enumerate(before)}
    known = as_known(numbers.keys())
    kept = {number: numbers[known(label)] for number, label in enumerate(classes) if known(label) in numbers}
    with torch.no_grad():
        for part, values in head.named_parameters():
            values[list(kept)] = rows[part][list(kept.values())]
    added = [label for number, label in enumerate(classes) if number not in kept]
    if not kept:
        logger.info("the head of the initial model has none of the classes, and a new one is trained")
    elif added:
        named = join_names(added[:5], len(added))
        logger.info("the head keeps %d classes of the initial model, and has new rows for %s", len(kept), named)
    else:
        logger.info("the head keeps all %d classes from the initial model", len(kept))


def _load_state(
    network: nn.Module, state: dict[str, torch.Tensor], name: str, weights: str, *, has_classes: bool
) -> None:
    """Load all weights that stay: the head of the file, which may be any or none, is replaced afterwards.

    With `has_classes`, rows of it may be kept; the file is a model package, about which nothing is logged.
    """
    current = network.state_dict()
    head = last_layer(network)
    replaced = tuple(f"{layer}." for layer in (head, *AUXILIARY))
    # Files of torch 0.4.0 lack num_batches_tracked, which has no effect here.
    backbone = [key for key in current if not key.startswith(replaced) and not key.endswith("num_batches_tracked")]
    found = {_usual_name(key): value for key, value in state.items()}
    prefix = _prefix(backbone, found, weights)
    inside = {key.removeprefix(prefix): value for key, value in found.items() if key.startswith(prefix)}
    # Another head may have other layers, such as fc.1 in place of fc.
    of_head = {key for key in inside if key.startswith(f"{head.partition('.')[0]}.") and key not in backbone}
    missing = [key for key in backbone if key not in inside]
    unknown = sorted(inside.keys() - current.keys() - of_head)
    reshaped = [key for key in backbone if key in inside and inside[key].shape != current[key].shape]
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
    if invalid := [key for key in backbone if not _is_valid(key, inside[key])]:
        raise WrongInput(
            f"train.weights is '{weights}', with NaN, infinite values or negative variances in {len(invalid)} of its "
            f"tensors (first: {invalid[0]})",
            setting="train.weights",
            way_out="give the weights of a training run that did not diverge",
        )
    fitting = [key for key in inside if key in current and inside[key].shape == current[key].shape]
    current.update({key: inside[key] for key in fitting})  # It keeps the versions that MNASNet needs.
    network.load_state_dict(current)
    if has_classes:
        return
    stripped = [text for text in (COMPILED, prefix) if text and any(text in key for key in state)]
    others = [key for key in found if not key.startswith(prefix)]
    has_usual_head = of_head == {key for key in fitting if key.startswith(f"{head}.")}
    for is_so, note in (
        (stripped, f"the names of its tensors are read without {' and '.join(stripped)}"),
        (not of_head, "it has no head, and a new one is trained"),
        (of_head and not has_usual_head, "its head is of another shape, and a new one is trained"),
        (others, f"tensors that are not of {name} are left out (first: {''.join(others[:1])})"),
    ):
        if is_so:
            logger.info("train.weights '%s': %s", weights, note)


def _usual_name(key: str) -> str:
    """Return torchvision's name of a tensor of a compiled network, or of a DenseNet in a file of torchvision."""
    return re.sub(r"(denselayer\d+\.(?:norm|conv))\.(?=[12]\.)", r"\1", key.replace(COMPILED, ""))


def _prefix(backbone: Sequence[str], found: Collection[str], weights: str) -> str:
    """Return the text before the names of the network in a file, such as `module.`; empty if the names do not fit.

    Raises:
        WrongInput: The file has the network several times.
    """
    first = backbone[0]
    candidates = [key.removesuffix(first) for key in found if f".{key}".endswith(f".{first}")]
    fitting = [prefix for prefix in candidates if all(prefix + key in found for key in backbone)]
    if len(fitting) > 1:
        raise WrongInput(
            f"train.weights is '{weights}', with {len(fitting)} networks (first: '{fitting[0]}', '{fitting[1]}')",
            setting="train.weights",
            way_out="save the state dict of one of them",
        )
    return max(candidates, key=lambda prefix: sum(prefix + key in found for key in backbone), default="")


def _is_valid(key: str, values: torch.Tensor) -> bool:
    return bool(torch.isfinite(values).all()) and not (key.endswith("running_var") and bool((values < 0).any()))


def at_least_two(inputs: torch.Tensor) -> torch.Tensor:
    """Return the inputs, with a copy of a single one, or two zeros for none.

    Batch norm needs at least two values per channel, and some networks cannot pass an empty batch.
    """
    if len(inputs) == 0:
        return inputs.new_zeros((2, *inputs.shape[1:]))
    return torch.cat([inputs, inputs]) if len(inputs) == 1 else inputs
