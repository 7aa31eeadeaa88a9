"""Where things lie, on what Spark they run, and what all settings share."""

from pydantic import Field

from tasks.config.frozen import FrozenConfig
from tasks.config.values import Memory, SparkMaster
from tasks.credentials import SparkSettings, Url


class StorageConfig(FrozenConfig):
    """Where a run writes. Every place may be a folder or a URL; what is empty lies under `home`."""

    home: Url | None = Field(
        None, description="Folder for everything a run writes; empty: $LAKEVISION_HOME, else ./.lakevision"
    )
    tables: Url | None = Field(
        None,
        description="Folder or URL of the Delta tables; a name without a slash is a folder under home (./name one in "
        "the current folder); empty: `tables` under home",
    )
    cache: Url | None = Field(None, description="Folder or URL of the training caches; empty: `cache` under home")
    artifacts: Url | None = Field(
        None, description="Folder or URL of MLflow's artifacts; empty: `artifacts` under home"
    )
    tracking: Url | None = Field(
        None,
        description="MLflow tracking URI, without a password; empty: $LAKEVISION_TRACKING_URI, else `mlflow.db` under "
        "home",
    )


class SparkConfig(FrozenConfig):
    """The Spark session of ETL, cache and inference."""

    master: SparkMaster = Field("local[*]", description="Spark master URL")
    driver_memory: Memory = Field("3g", description="Java heap of the driver: 512m to 16t, e.g. 3g")
    conf: SparkSettings = Field(default_factory=dict, description="More Spark settings, no secrets; they win over ours")
