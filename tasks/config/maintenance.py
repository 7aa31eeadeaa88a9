"""Parameters of the maintenance of Delta tables."""

from pydantic import Field

from tasks.config.frozen import FrozenConfig
from tasks.config.run import TABLES, SparkRun


class MaintainConfig(FrozenConfig):
    """Compaction and clean-up of the Delta tables."""

    vacuum_hours: int = Field(
        168,
        ge=0,
        le=876_000,
        description="Files that left the table longer ago than this are deleted; versions that registered models "
        "were trained from are kept in any case",
    )
    file_megabytes: int = Field(256, ge=1, le=4096, description="Size to which small data files are compacted, in MB")


class MaintainRun(SparkRun):
    """Parameters of the flow `maintain`."""

    first = TABLES | {name: ("maintain", name) for name in ("vacuum_hours", "file_megabytes")}

    maintain: MaintainConfig = MaintainConfig()
