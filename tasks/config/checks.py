"""Parameters of the repetition of a training run, and of the sanity checks before a long one."""

from pydantic import Field

from tasks.config.frozen import FrozenConfig
from tasks.config.run import SparkRun
from tasks.config.train import TrainRun
from tasks.config.values import RunId


class RepeatRun(SparkRun):
    """Parameters of the flow `repeat`."""

    run_id: RunId | None = Field(None, description="MLflow run to repeat; empty: the newest finished training run")


class OverfitConfig(FrozenConfig):
    """Overfitting of a single batch, which any model that is able to learn achieves."""

    max_steps: int = Field(200, ge=1, le=100_000, description="Maximum number of training steps on the batch")
    target_loss_ratio: float = Field(
        0.1, gt=0.0, lt=1.0, description="Fraction of the initial loss below which the loss must fall"
    )


class GradientConfig(FrozenConfig):
    """Inspection of the gradients of the first batches."""

    num_batches: int = Field(
        2,
        ge=1,
        le=1000,
        description="Number of batches to train on; in the first, a layer initialised with zeros passes no gradient on",
    )


class OverfitRun(TrainRun):
    """Parameters of the flow `overfit-batch`."""

    overfit: OverfitConfig = OverfitConfig()


class GradientRun(TrainRun):
    """Parameters of the flow `check-gradients`."""

    gradients: GradientConfig = GradientConfig()
