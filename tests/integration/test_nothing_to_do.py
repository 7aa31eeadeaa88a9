"""Runs with nothing to do, which start no Spark and succeed without Java."""

import json
from pathlib import Path

import pandas as pd

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


def check_terminal(stdout: str, stderr: str, home: str, options: tuple[str, ...]) -> None:
    """Check that the JSON is on stdout, and the least sure images, the CSV file and the next command end stderr."""
    report = json.loads(stdout)
    assert (report["csv"], report["num_files"], report["failed"]) == (f"{home}/predictions.csv", 60, [])
    assert len(pd.read_csv(report["csv"])) == 60
    lines = stderr.rstrip().split("Least sure, by ")[1].splitlines()
    # At its exit, the process stops Prefect's temporary server, and says so.
    assert [line for line in lines[25:] if "Stopping temporary server" not in line] == []
    probabilities = [float(line.split()[0]) for line in lines[2:22]]
    assert probabilities == sorted(probabilities)
    assert lines[23] == f"all answers  {home}/predictions.csv (60 files, 0 of them failed)"
    _source, source, _home, _ = options
    command = f"-m flows.predict_stream --storage.home {home} --predict.source {source} --interval_seconds 30"
    assert lines[24] == f"next         .venv/bin/python {command}   (new images as they come)"


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
    options = ("--source", str(source), "--storage.home", storage.home)
    ended = run_python("-m", "flows.predict_batch", *options, environment=environment, timeout=240)
    check_terminal(ended.stdout, ended.stderr, storage.home, options)
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
