"""Parameters of Delta table maintenance."""

from pydantic import Field

from tasks.config.frozen import FrozenConfig
from tasks.config.run import TABLES, SparkRun
from tasks.config.values import Seconds


class MaintainConfig(FrozenConfig):
    """Compaction and vacuum of the Delta tables."""

    vacuum_hours: int = Field(
        168,
        ge=0,
        le=876_000,
        description="Retention of files that the table no longer uses, in hours; versions that registered models were "
        "trained from are always retained",
    )
    file_megabytes: int = Field(256, ge=1, le=4096, description="Target size of compacted data files, in MB")
    keep_model_versions: int | None = Field(
        None,
        ge=1,
        description="Number of the newest versions of each model whose predictions are kept. Those of the "
        "aliases champion, previous and challenger are kept in any case; empty: all",
    )
    trust_tracking: bool = Field(
        False,
        description="Clean up although another tracking server pinned versions of the table images, or nobody did: the "
        "server of this run has the models of the table. Pinned versions are kept in any case",
    )
    release_pins: bool = Field(
        False,
        description="Remove pins of this tracking server that none of its registered models needs any more, as after "
        "models were deleted, and the predictions by models that it does not have",
    )
    timeout_seconds: Seconds = Field(
        86_400, description="Timeout of maintenance, in seconds, for one attempt; a longer attempt is not retried"
    )


class MaintainRun(SparkRun):
    """Parameters of the flow `maintain`."""

    first_screen = TABLES | {name: ("maintain", name) for name in ("vacuum_hours", "file_megabytes")}

    maintain: MaintainConfig = MaintainConfig()
