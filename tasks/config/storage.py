"""Parameters of the storage locations and of the Spark session."""

from pydantic import Field

from tasks.config.frozen import FrozenConfig
from tasks.config.values import Memory, SparkMaster
from tasks.credentials import SparkSettings, Url


class StorageConfig(FrozenConfig):
    """Locations that a run writes to, each a folder or a URL; empty ones are under `home`."""

    home: Url | None = Field(
        None, description="Local folder for all output of a run; empty: $LAKEVISION_HOME, else ./.lakevision"
    )
    tables: Url | None = Field(
        None,
        description="Folder or URL of the Delta tables; empty: `tables` under home, or for promotion, inference and "
        "maintenance those of the newest run there. A name without a slash is a folder under home, and ./name a folder "
        "in the current one",
    )
    cache: Url | None = Field(None, description="Folder or URL of the training caches; empty: `cache` under home")
    artifacts: Url | None = Field(
        None,
        description="Folder or URL of MLflow's artifacts; empty: $LAKEVISION_ARTIFACTS, else where a tracking server "
        "keeps them, else `artifacts` under home",
    )
    tracking: Url | None = Field(
        None,
        description="MLflow tracking URI, without a password; empty: $LAKEVISION_TRACKING_URI, else `mlflow.db` under "
        "home",
    )


class SparkConfig(FrozenConfig):
    """Spark session of ETL, cache and inference."""

    master: SparkMaster = Field("local[*]", description="Spark master URL")
    driver_memory: Memory = Field("3g", description="Java heap of the driver, 512m to 16t, such as 3g")
    conf: SparkSettings = Field(
        default_factory=dict, description="Additional Spark settings, without secrets; they override lakevision's own"
    )
