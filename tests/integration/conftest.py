"""One local Spark session for all, and Prefect's test harness."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
from prefect.testing.utilities import prefect_test_harness
from pyspark.sql import SparkSession

from tasks.config.storage import SparkConfig, StorageConfig
from tasks.refs import CacheRef
from tasks.spark.session import spark_session
from tasks.storage import Storage, resolve_storage
from tests.builders.hand_made_cache import hand_made_cache


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """Keep one session open: what runs inside finds it active and leaves it open."""
    home = tmp_path_factory.mktemp("spark-home")
    with spark_session(SparkConfig(driver_memory="2g"), resolve_storage(StorageConfig(home=str(home)))) as session:
        yield session


@pytest.fixture(scope="session")
def prefect_harness() -> Iterator[None]:
    """Run flows against a temporary server with a database of its own."""
    with prefect_test_harness(server_startup_timeout=120):
        yield


@pytest.fixture(scope="session")
def empty_tracking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tracking database with nothing in it: MLflow takes seconds to make one, by all its migrations."""
    folder = tmp_path_factory.mktemp("tracking")
    SqlAlchemyStore(f"sqlite:///{folder}/mlflow.db", f"{folder}/artifacts")
    return folder / "mlflow.db"


@pytest.fixture
def storage(storage: Storage, empty_tracking: Path) -> Storage:
    """Return the storage of a run of its own, whose tracking database is there."""
    Path(storage.home).mkdir()
    shutil.copy(empty_tracking, storage.home)
    return storage


@pytest.fixture
def source(make_images) -> Path:  # type: ignore[no-untyped-def]
    """Return a folder with 3 classes of 20 images."""
    folder: Path = make_images()
    return folder


@pytest.fixture
def cache(source: Path, storage: Storage) -> CacheRef:
    """Return a cache of 60 images: 10 row groups of 4, 2 and 3 of 4."""
    return hand_made_cache(source, f"{storage.cache}/by-hand")
