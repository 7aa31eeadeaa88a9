"""Batch inference in a subprocess that a test may kill: killed_inference.py STORAGE PREDICTIONS GO.

It starts Spark, prints `ready`, waits for the file GO, and predicts.
"""

import logging
import subprocess
import sys
import time
from pathlib import Path

import deltalake

from tasks.config.prediction import PredictConfig
from tasks.config.promotion import PromoteConfig
from tasks.config.storage import SparkConfig
from tasks.predict.batch import predict_batch
from tasks.refs import PredictReport
from tasks.spark.session import keep_spark, spark_session
from tasks.storage import Storage
from tests.builders.delta_rows import delta_rows
from tests.builders.killed_runs import EndedRun, StartedRun, end_run, kill_after
from tests.builders.processes import ROOT, plain_environment

SPARK = SparkConfig(driver_memory="1g")
START_SECONDS = 240


def predict_into(predictions: Path, storage: Storage) -> PredictReport:
    """Predict the table `images` into a table of predictions."""
    settings = PredictConfig(batch_size=8, predictions=str(predictions))
    return predict_batch(settings, PromoteConfig(), storage, SPARK)


def run_inference(
    predictions: Path, storage: Storage, victim: str | None = None, seconds: float = 0.0
) -> tuple[float, bool, EndedRun]:
    """Run batch inference in a subprocess, and kill its driver, its JVM or a Python worker with SIGKILL.

    Args:
        predictions: Table of predictions; its log is beside it.
        storage: Storage with images and a champion.
        victim: As `killed_runs.VICTIMS`; None for an undisturbed run.
        seconds: Time of the kill after the work began.

    Returns:
        The duration of the work in seconds, whether the victim was running, and the run after its end.
    """
    log, go = predictions.with_suffix(".log"), predictions.with_suffix(".go")
    words = (storage.model_dump_json(), str(predictions), str(go))
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.builders.killed_inference", *words],
            cwd=ROOT,
            env=plain_environment(),
            stdout=file,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
    deadline = time.monotonic() + START_SECONDS
    while "ready\n" not in log.read_text() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    began, started = time.monotonic(), StartedRun(process, log)
    go.touch()
    killed = victim is not None and kill_after(started, victim, seconds)
    process.wait(START_SECONDS)
    took, ended = time.monotonic() - began, end_run(started)
    last = ended.output.splitlines()[-1][:200] if ended.output else "none"
    print(f"{victim} killed after {seconds:.2f} s: {killed}; status {ended.returncode}, last line: {last}")
    return took, killed, ended


def predicted(predictions: Path) -> list[tuple[str, int, str, float]]:
    """Return the sorted rows of a table of predictions, without the time; none if it does not exist."""
    if not (predictions / "_delta_log").is_dir():
        return []
    try:
        rows = delta_rows(deltalake.DeltaTable(predictions)).to_pylist()
    except deltalake.exceptions.TableNotFoundError:
        return []
    return sorted((row["sha256"], row["model_version"], row["label"], round(row["probability"], 4)) for row in rows)


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s")
    logging.getLogger("lakevision").setLevel(logging.INFO)
    used, table, signal_file = Storage.model_validate_json(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    with keep_spark():
        with spark_session(SPARK, used):
            pass  # Started before the work, so that the kill hits the work.
        print("ready", flush=True)
        while not signal_file.exists():
            time.sleep(0.02)
        predict_into(table, used)
