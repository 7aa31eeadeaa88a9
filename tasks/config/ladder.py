"""Parameters of the scaling ladder."""

from typing import Self

from pydantic import Field, model_validator

from tasks.config.distributed import DistributedConfig, check_options
from tasks.config.frozen import FrozenConfig
from tasks.config.pipeline import VerdictRun


class LadderConfig(FrozenConfig):
    """The sample of the first steps, and the price of a machine."""

    sample_fraction: float = Field(
        0.1, gt=0.0, lt=1.0, description="Fraction of the images in the first three steps, in tables of their own"
    )
    cost_per_hour: float = Field(
        0.0, ge=0.0, le=1e6, description="Price of one machine for an hour, in any currency; 0: costs are left out"
    )


class LadderRun(VerdictRun):
    """Parameters of the flow `scaling-ladder`."""

    distributed: DistributedConfig = DistributedConfig()
    ladder: LadderConfig = LadderConfig()

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        check_options(self.train, self.distributed, self.spark)
        return self
