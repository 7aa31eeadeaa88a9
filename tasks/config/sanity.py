"""What a person fills in on the checks of a model and its data before a long training."""

from pydantic import Field

from tasks.config.frozen import FrozenConfig
from tasks.config.train import TrainRun


class OverfitConfig(FrozenConfig):
    """A training on one batch alone, which a model that can learn at all learns by heart."""

    max_steps: int = Field(200, ge=1, le=100_000, description="Steps on the one batch at most")
    target_loss_ratio: float = Field(
        0.1, gt=0.0, lt=1.0, description="The loss has to fall below this share of what it was before the first step"
    )


class GradientConfig(FrozenConfig):
    """A look at the gradients of the first batches."""

    num_batches: int = Field(
        2,
        ge=1,
        le=1000,
        description="Batches to train on; a layer that begins with zeros lets no gradient through in the first",
    )


class OverfitRun(TrainRun):
    """Parameters of the flow `overfit-batch`."""

    overfit: OverfitConfig = OverfitConfig()


class GradientRun(TrainRun):
    """Parameters of the flow `check-gradients`."""

    gradients: GradientConfig = GradientConfig()
