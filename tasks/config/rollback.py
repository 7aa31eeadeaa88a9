"""Parameters of the rollback to the previous champion."""

from pydantic import Field

from tasks.config.frozen import FrozenConfig
from tasks.config.run import TABLES, SparkRun
from tasks.config.values import ModelName


class RollbackConfig(FrozenConfig):
    """Rollback to the previous champion."""

    model_name: ModelName | None = Field(
        None, description="Name of the registered model; empty: the model of the table `images`"
    )
    version: int | None = Field(
        None,
        ge=1,
        description="Number of the version to roll back, so that a repeated run does not go back twice; empty: the "
        "champion",
    )
    reason: str = Field("", max_length=500, description="Why, for the log and the tag of the version")


class RollbackRun(SparkRun):
    """Parameters of the flow `rollback`."""

    first_screen = TABLES | {name: ("rollback", name) for name in ("model_name", "version", "reason")}

    rollback: RollbackConfig = RollbackConfig()
