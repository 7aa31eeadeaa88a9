"""Recipes of training: phases and the values of settings that are not given.

The values were chosen on photos with pretrained weights (tests/benchmarks/LOG.md).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from tasks.config.augmentation import AugmentationConfig
from tasks.config.train import DEFAULTS, Monitor, TrainConfig


class PhaseTrain(TrainConfig):
    """Settings of a phase, each with a value. The defaults are those of release 0.1.0, and of the recipe given."""

    freeze_backbone: bool = DEFAULTS["freeze_backbone"]
    optimizer: Literal["adam", "adamw", "sgd"] = DEFAULTS["optimizer"]
    learning_rate: float = DEFAULTS["learning_rate"]
    schedule: Literal["cosine", "constant", "one_cycle", "plateau"] = DEFAULTS["schedule"]
    layer_decay: float = 1.0
    weight_decay: float = DEFAULTS["weight_decay"]
    label_smoothing: float = DEFAULTS["label_smoothing"]
    ema_decay: float = 0.0
    max_epochs: int = DEFAULTS["max_epochs"]
    monitor: Monitor = DEFAULTS["monitor"]


class FineTuningPlan(BaseModel):
    """Epochs and augmentation of a phase of all layers, decided when the head is trained, and recorded."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    epochs: int = Field(ge=0)
    """Epochs of the phase; 0 leaves it out."""
    flip: bool
    """Whether images are mirrored."""
    reason: str
    """Sentence for the log and the card."""


UNPLANNED = FineTuningPlan(epochs=1, flip=False, reason="")
"""Plan of one epoch, for checks and measurements of the phase of all layers."""

ALWAYS: dict[str, Any] = {"monitor": "val_calibrated_loss"}
"""Values in all phases of a recipe."""

HEAD: dict[str, Any] = {"optimizer": "adamw", "max_epochs": 8}
"""Values for a head on a frozen backbone, whose cached features are standardized."""

HEAD_WEIGHT_DECAYS = (3.0, 1.0, 0.3, 0.1, 0.0)
"""Weight decays of a head on cached features: a phase each, from the best weights so far, and the best one on `val`."""

ALL_LAYERS: dict[str, Any] = {
    "optimizer": "adamw",
    "learning_rate": 2e-4,
    "layer_decay": 0.05,
    "weight_decay": 0.05,
    "label_smoothing": 0.1,
    "ema_decay": 0.99,
}
"""Values for fine-tuning all layers after the head."""

WARMUP_SHARE = 0.15
"""Warm-up of a planned phase, as a share of its epochs."""

CROP, COLOUR = 0.7, 0.2
"""Minimum area of a crop, and maximum change of colours, of the augmentation in fine-tuning."""

MAX_PLANNED_EPOCHS = 12
"""Maximum number of epochs that are planned: more gained nothing."""


HEAD_NAME = "head"
"""First word of the names of phases that train the head alone."""


@dataclass(frozen=True)
class Phase:
    """A phase of a training run."""

    number: int
    unfreeze_from: str | None
    """First trained layer; None: only the head, or all layers if the backbone is not frozen."""
    train: PhaseTrain
    """Settings in this phase."""
    whole: bool = False
    """True if it is judged over its whole schedule: patience does not end it."""

    @property
    def name(self) -> str:
        """Name of the phase on the card."""
        head = HEAD_NAME if self.train.freeze_backbone else "all layers"
        layers = {None: head, "all": "all layers"}.get(self.unfreeze_from, f"from {self.unfreeze_from}")
        return f"{layers}, weight decay {self.train.weight_decay:g}"


def values_of(train: TrainConfig, chosen: Mapping[str, Any] | None = None) -> PhaseTrain:
    """Return the settings with a value for each: the given one, the chosen one, or the default of PhaseTrain."""
    given = {name: value for name, value in train if value is not None and not (name in DEFAULTS and value == "auto")}
    by_recipe = {} if train.recipe == "given" else {**ALWAYS, **(chosen or {})}
    return PhaseTrain.model_construct(**{**by_recipe, **given})


def phases_of(train: TrainConfig, plan: FineTuningPlan | None = None, *, on_features: bool = True) -> list[Phase]:
    """Return the phases in order.

    Args:
        train: Settings of the training run.
        plan: Plan of the fine-tuning by the recipe; None leaves it out.
        on_features: Whether the head can be trained on cached features, where a path of weight decays takes seconds.
    """
    if train.trained == "all":
        return [Phase(0, None, values_of(train, {"freeze_backbone": False}))]
    phases = [Phase(0, None, values_of(train, HEAD))]
    if train.recipe != "given" and train.weight_decay is None and train.makes_features and on_features:
        phases = [
            Phase(number, None, values_of(train, {**HEAD, "weight_decay": decay}))
            for number, decay in enumerate(HEAD_WEIGHT_DECAYS)
        ]
    later = len(phases)
    for number, given in enumerate(train.fine_tune, later):
        rate = {"learning_rate": given.learning_rate, "max_epochs": given.max_epochs}
        phases.append(Phase(number, given.unfreeze_from, values_of(train, ALL_LAYERS).model_copy(update=rate)))
    if train.plans_fine_tuning and plan is not None and plan.epochs:
        phases.append(_planned(train, plan, later))
    return phases


def _planned(train: TrainConfig, plan: FineTuningPlan, number: int) -> Phase:
    values = values_of(train, {**ALL_LAYERS, "warmup_epochs": WARMUP_SHARE * plan.epochs})
    augmentation = values.augmentation
    if augmentation.by_recipe and not augmentation.is_on:
        augmentation = AugmentationConfig(flip=plan.flip, resized_crop=CROP, colour=COLOUR)
    own = {"learning_rate": ALL_LAYERS["learning_rate"], "max_epochs": plan.epochs, "augmentation": augmentation}
    return Phase(number, "all", values.model_copy(update=own), whole=True)


def total_epochs(train: TrainConfig, plan: FineTuningPlan | None = None, *, on_features: bool = True) -> int:
    """Return the maximum number of epochs over all phases of `phases_of`; a phase without a plan does not count."""
    return sum(phase.train.max_epochs for phase in phases_of(train, plan, on_features=on_features))


def monitored(train: TrainConfig) -> str:
    """Return the monitored metric."""
    return values_of(train).monitor


def lower_is_better(monitor: str) -> bool:
    """Return whether a monitored metric is a loss."""
    return monitor.endswith("loss")
