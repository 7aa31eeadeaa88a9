"""Fixtures of the integration tests: a shared Spark session, Prefect's test harness, storage and caches."""

from collections.abc import Callable, Iterator
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
from tests.builders.homes import home_with_tracking
from tests.builders.prefect_databases import copy_prefect_database
from tests.builders.trials import predict_here


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """Keep one session open: code under test finds it active and leaves it open."""
    home = tmp_path_factory.mktemp("spark-home")
    with spark_session(SparkConfig(driver_memory="2g"), resolve_storage(StorageConfig(home=str(home)))) as session:
        yield session


@pytest.fixture(scope="session", autouse=True)
def trials_here() -> Iterator[None]:
    """Let promotions of the tests' processes try models in them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tasks.registry.aliases.predict_once", predict_here)
        yield


@pytest.fixture(scope="session")
def prefect_harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Run flows against a temporary server with an empty database, which needs no migrations."""
    folder = tmp_path_factory.mktemp("harness")
    copy_prefect_database(folder, tmp_path_factory, "prefect-test.db")
    with pytest.MonkeyPatch.context() as patch:
        # The harness makes the folder of its database itself, and removes it at the end of the process.
        patch.setattr("prefect.testing.utilities.mkdtemp", lambda: str(folder / "prefect"))
        with prefect_test_harness(server_startup_timeout=120):
            yield


@pytest.fixture(scope="session")
def empty_tracking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an empty tracking database: MLflow takes seconds to create one, by running all migrations."""
    folder = tmp_path_factory.mktemp("tracking")
    SqlAlchemyStore(f"sqlite:///{folder}/mlflow.db", f"{folder}/artifacts")
    return folder / "mlflow.db"


@pytest.fixture
def make_home(tmp_path: Path, empty_tracking: Path) -> Callable[[str], Storage]:
    """Return a function that creates a home with an empty tracking database in the test's folder."""
    return lambda name: home_with_tracking(tmp_path / name, empty_tracking)


@pytest.fixture
def storage(make_home: Callable[[str], Storage]) -> Storage:
    """Return a storage in a temporary home with an empty tracking database."""
    return make_home("home")


@pytest.fixture
def source(make_images) -> Path:  # type: ignore[no-untyped-def]  # a fixture
    """Return a source folder with 3 classes of 20 images."""
    folder: Path = make_images()
    return folder


@pytest.fixture
def cache(source: Path, storage: Storage) -> CacheRef:
    """Return a cache of 60 images: 39 in train, 11 in val and 10 in test, in row groups of 4."""
    return hand_made_cache(source, f"{storage.cache}/by-hand")
