"""Runs with nothing to do, which start no Spark and succeed without Java."""

from pathlib import Path

from tasks.config.etl import EtlConfig
from tasks.config.promotion import PromoteConfig
from tasks.config.storage import SparkConfig
from tasks.etl.ingest import ingest_images
from tasks.registry.promote import promote_best
from tests.builders.processes import plain_environment, run_python
from tests.builders.untrained_model import log_run, predict
from tests.conftest import write_images

CODE = """
import sys
from tasks.config.etl import EtlConfig
from tasks.config.prediction import PredictConfig
from tasks.config.promotion import PromoteConfig
from tasks.config.storage import SparkConfig, StorageConfig
from tasks.etl.ingest import ingest_images
from tasks.predict.batch import predict_batch
from tasks.storage import resolve_storage

storage = resolve_storage(StorageConfig(home=sys.argv[2]))
print("changed", ingest_images(EtlConfig(source=sys.argv[1]), storage, SparkConfig()).changed)
print("predicted", predict_batch(PredictConfig(), PromoteConfig(), storage, SparkConfig()).predicted)
files = predict_batch(PredictConfig(source=sys.argv[1]), PromoteConfig(), storage, SparkConfig())
print("files", files.predicted, files.inputs.version)
"""


def test_ingesting_and_predicting_again_needs_no_java(spark, source, storage, tmp_path):
    """Unchanged inputs need no Java; with a new image the run asks for Java before it changes anything."""
    ingest_images(EtlConfig(source=str(source)), storage, SparkConfig())
    promote_best([log_run(storage, tmp_path, seed=1, accuracy=0.5)], PromoteConfig(), storage)
    assert predict(storage).predicted == 60
    assert predict(storage, source=str(source)).predicted == 60
    arguments = ("-c", CODE, str(source), storage.home)
    environment = plain_environment(JAVA_HOME=str(tmp_path / "nowhere"))
    done = run_python(*arguments, environment=environment, timeout=240)
    assert done.stdout.splitlines() == ["changed False", "predicted 0", "files 0 0"], done.stderr
    marker = Path(storage.table("files"), "_delta_log", "_unfinished-0-dead")
    marker.touch()
    done = run_python(*arguments, environment=environment, timeout=240)
    assert "WrongInput: Spark needs Java 17 or 21" in done.stderr
    assert marker.exists()  # A JVM that outlived its driver may still write the files that the marker names.
    marker.unlink()
    write_images(source, per_class=1, first=50)
    done = run_python(*arguments, environment=environment, timeout=240)
    assert "WrongInput: Spark needs Java 17 or 21" in done.stderr
    assert "NeedsSpark" not in done.stderr
    assert ingest_images(EtlConfig(source=str(source)), storage, SparkConfig()).read == 3
