"""One model, asked in every way in which a user may ask it: the same bytes have the same answer."""

import base64
import json
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import mlflow
import numpy as np
import pandas as pd
import torch
from PIL import Image
from pyspark.sql import SparkSession

from tasks.config.prediction import PredictConfig
from tasks.config.promotion import PromoteConfig
from tasks.config.storage import SparkConfig
from tasks.model.training_network import build_classifier
from tasks.model_package.classifier import ImageClassifier, Prediction, save_classifier
from tasks.model_package.description import RATES, Precision
from tasks.model_package.serving import computes_bf16
from tasks.predict.batch import predict_batch
from tasks.refs import RunRef
from tasks.registry.promote import promote_best
from tasks.storage import Storage
from tasks.tracking.tracked_run import tracked_run
from tests.builders.image_bytes import deep_png, encoded, lossless_jpeg
from tests.builders.processes import bare_environment
from tests.builders.streams import stream

NAME = "answers"
CLASSES = ("ant", "bee", "cat", "dog")
START_SECONDS = 120
TOP_K, MIN_PROBABILITY = 3, 0.65
"""Some of the images are less probable than that, and some are more."""
UNKNOWN_RATE, THRESHOLD = 0.05, 0.66
"""Some of the images have a score above the threshold of this rate, and some do not."""
SETTINGS = {"top_k": TOP_K, "min_probability": MIN_PROBABILITY, "unknown_rate": UNKNOWN_RATE}

Row = dict[str, Any]


def images() -> dict[str, bytes]:
    """Return encoded images of several formats, modes and sizes, and broken ones, by name."""
    generator = np.random.default_rng(3)

    def noise(height: int, width: int, mode: str = "RGB") -> Image.Image:
        channels = len(Image.new(mode, (1, 1)).getbands())
        colour = generator.integers(0, 256, (1, 1, channels))
        samples = (colour + generator.integers(-60, 61, (height, width, channels))).clip(0, 255).astype(np.uint8)
        return Image.fromarray(samples.squeeze(), mode)

    made = {f"noise-{number}": encoded(noise(40 + 9 * number, 60), "JPEG") for number in range(9)}
    made |= {"transparent": encoded(noise(50, 30, "RGBA")), "gray": encoded(noise(33, 99, "L"), "BMP")}
    samples = generator.integers(0, 4096, (40, 50, 3))
    made |= {"sixteen": deep_png(samples * 16), "twelve": deep_png(samples, (b"sBIT", b"\x0c\x0c\x0c"))}
    made |= {"lossless": lossless_jpeg(320), "unknown": deep_png(samples)}
    upright, exif = noise(70, 40), Image.Exif()
    exif[0x0112] = 6
    made |= {"upright": encoded(upright), "turned": encoded(upright.transpose(Image.Transpose.ROTATE_90), exif=exif)}
    made |= {"empty": b"", "text": b"no image at all", "cut": made["noise-1"][:150]}
    return made


CONTENTS = images()


def log_model(storage: Storage, folder: Path, precision: Precision) -> RunRef:
    """Log a run with an untrained model, whose probabilities differ between images."""
    torch.manual_seed(8)
    network = build_classifier("resnet18", "none", len(CLASSES), freeze_backbone=False).train()
    with torch.no_grad():
        network.head.weight.normal_(std=0.6)
        for _step in range(30):
            network(torch.randint(0, 256, (8, 128, 128, 3), dtype=torch.uint8))
    thresholds = tuple(THRESHOLD if rate == UNKNOWN_RATE else 1.0 if rate < UNKNOWN_RATE else 0.0 for rate in RATES)
    given: dict[str, Any] = {"precision": precision, "temperature": 4, "unknown_thresholds": thresholds}
    save_classifier(folder, "resnet18", network.state_dict(), CLASSES, 128, **given)
    data = {"table": "", "version": 0, "table_id": "", "source": "", "content_digest": "x", "rows": {"test": 10}}
    with tracked_run(storage, "test", "key", {"cache": {"digest": "one"}, "data": data}, {}, None) as run:
        run.log_metrics({"test_accuracy": 0.9, "best_val_accuracy": 0.9}, step=0)
        run.log_model(folder)
        return RunRef(run_id=run.run_id)


def plain_rows(frame: pd.DataFrame) -> list[Row]:
    """Return the rows of the model in MLflow, in which no value is missing, with None as in the other ways."""
    return [
        {
            "label": row["label"] or None,
            "index": None if row["index"] < 0 else int(row["index"]),
            "probability": None if row["error"] else float(row["probability"]),
            "top_labels": list(row["top_labels"]),
            "top_probabilities": [float(value) for value in row["top_probabilities"]],
            "error": row["error"] or None,
            "unknown_score": None if row["unknown_score"] < 0 else float(row["unknown_score"]),
        }
        for row in frame.to_dict("records")
    ]


def rows_of(predictions: list[Prediction]) -> list[Row]:
    """Return predictions of a Python call as rows, with lists as in a table."""
    return [
        {name: list(value) if isinstance(value, tuple) else value for name, value in vars(one).items()}
        for one in predictions
    ]


def of_python(folder: Path) -> list[Row]:
    """Return the answers of a plain Python call."""
    return rows_of(ImageClassifier.load(folder).predict(list(CONTENTS.values()), **SETTINGS))


def of_one_image_after_the_other(folder: Path) -> list[Row]:
    """Return the answers of Python calls with a single image each."""
    model = ImageClassifier.load(folder)
    return rows_of([model.predict([content], **SETTINGS)[0] for content in CONTENTS.values()])


def write_contents(spark: SparkSession, table: str) -> None:
    """Write the images as a table that a stream can follow."""
    frame = spark.createDataFrame(list(CONTENTS.items()), "sha256 string, content binary").repartition(3)
    frame.write.format("delta").option("delta.enableChangeDataFeed", "true").save(table)


def rows_in_table(spark: SparkSession, path: str) -> list[Row]:
    """Return the answers in a table of predictions."""
    rows = {row["sha256"]: row for row in spark.read.format("delta").load(path).collect()}
    names = ("label", "index", "probability", "top_labels", "top_probabilities", "error", "unknown_score")
    return [{name: rows[key][name] for name in names} for key in CONTENTS]


def of_batch(spark: SparkSession, storage: Storage, table: str) -> list[Row]:
    """Return the answers of batch inference, as rows of the table of predictions."""
    settings = PredictConfig(table=table, batch_size=4, **SETTINGS)
    predict_batch(settings, PromoteConfig(model_name=NAME), storage, SparkConfig())
    return rows_in_table(spark, storage.table("predictions"))


def of_stream(spark: SparkSession, storage: Storage, table: str) -> list[Row]:
    """Return the answers of a stream on the same table."""
    path = storage.table("streamed")
    stream(storage, NAME, table=table, predictions=path, **SETTINGS)
    return rows_in_table(spark, path)


def of_spark_udf(spark: SparkSession, uri: str) -> list[Row]:
    """Return the answers of the UDF that MLflow makes of the model."""
    answer = mlflow.pyfunc.spark_udf(spark, uri, env_manager="local", params=SETTINGS)
    rows = [(number, content) for number, content in enumerate(CONTENTS.values())]
    frame = spark.createDataFrame(rows, "number int, content binary").repartition(2)
    found = frame.select("number", answer("content").alias("answer")).select("number", "answer.*").orderBy("number")
    return plain_rows(pd.DataFrame([row.asDict() for row in found.collect()]))


def of_fresh_process(uri: str, storage: Storage, tmp_path: Path) -> list[Row]:
    """Return the answers of MLflow's loader in a project that has a package called `tasks`, and not ours."""
    project = tmp_path / "project"
    (project / "tasks").mkdir(parents=True)
    (project / "tasks" / "__init__.py").write_text("OURS = 'another project'\n")
    (tmp_path / "contents.json").write_text(
        json.dumps([base64.b64encode(content).decode() for content in CONTENTS.values()])
    )
    program = f"""
import base64, json, sys
import mlflow, pandas as pd
import tasks
mlflow.set_tracking_uri({storage.tracking!r})
model = mlflow.pyfunc.load_model({uri!r})
with open({str(tmp_path / "contents.json")!r}) as file:
    contents = [base64.b64decode(text) for text in json.load(file)]
found = model.predict(pd.DataFrame({{"content": contents}}), params={SETTINGS})
assert tasks.OURS == "another project"
assert not [name for name in sys.modules if name.startswith(("tasks.", "prefect"))]
print(found.to_json(orient="records"))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=project,
        env=bare_environment(tmp_path, str(project)),
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return plain_rows(pd.DataFrame(json.loads(done.stdout.splitlines()[-1])))


@contextmanager
def served(uri: str, storage: Storage, tmp_path: Path) -> Iterator[str]:
    """Serve the model with `mlflow models serve`, and yield the URL of its invocations."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "models", "serve", "--model-uri", uri, "--env-manager", "local"]
    log = tmp_path / "serve.log"
    environment = bare_environment(tmp_path)
    # MLflow starts uvicorn by its name, as in an activated environment.
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    with log.open("w") as output:
        server = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            cwd=tmp_path,
            env=environment | {"MLFLOW_TRACKING_URI": storage.tracking},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            try:
                httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).raise_for_status()
                break
            except httpx.HTTPError:
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/invocations"
    finally:
        server.terminate()
        server.wait(30)


def ask(url: str, texts: list[str]) -> tuple[int, dict[str, Any]]:
    """Send base64 texts; return status and answer."""
    body = {
        "dataframe_split": {"columns": ["content"], "data": [[text] for text in texts]},
        "params": SETTINGS,
    }
    response = httpx.post(url, json=body, timeout=60)
    return response.status_code, response.json()


def of_http(uri: str, storage: Storage, tmp_path: Path) -> list[Row]:
    """Return the answers of MLflow's own server over HTTP, which answers broken base64 with an error."""
    with served(uri, storage, tmp_path) as url:
        texts = [base64.b64encode(content).decode() for content in CONTENTS.values()]
        status, answer = ask(url, texts)
        assert status == 200, answer
        for broken in ("*not base64*", texts[0][:-3]):
            status, refused = ask(url, [texts[0], broken])
            assert (status, refused["error_code"]) == (400, "BAD_REQUEST")
            assert "row 1 of content is not base64" in refused["stack_trace"]
    return plain_rows(pd.DataFrame(answer["predictions"]))


def differences(found: list[Row], expected: list[Row]) -> list[str]:
    """Return the differing values of two lists of answers, as text.

    The kernels of float32 sum in another order in batches of another size: probabilities are equal up to rounding.
    """
    assert len(found) == len(expected)
    texts = []
    for name, one, other in zip(CONTENTS, found, expected, strict=True):
        for column, value in other.items():
            numbers = [value] if isinstance(value, float) else value
            if column in ("probability", "top_probabilities", "unknown_score") and numbers:
                given = [one[column]] if isinstance(value, float) else one[column]
                same = all(math.isclose(a, b, abs_tol=1e-5) for a, b in zip(given, numbers, strict=True))
            else:
                same = one[column] == value
            texts += [] if same else [f"{name}.{column}: {one[column]} instead of {value}"]
    return texts


def test_all_ways_give_the_same_answers(spark: SparkSession, storage: Storage, tmp_path: Path) -> None:
    """Batch, stream, Spark UDF, HTTP, a fresh process and Python calls agree on labels, numbers and errors."""
    precision: Precision = "bfloat16" if computes_bf16(torch.device("cpu")) else "float32"
    folder = tmp_path / "package"
    promote_best([log_model(storage, folder, precision)], PromoteConfig(model_name=NAME), storage)
    mlflow.set_tracking_uri(storage.tracking)
    uri = f"models:/{NAME}@champion"

    expected = of_python(folder)

    assert {row["label"] for row in expected} > {"unsure", "unknown", None}
    # Unknown goes before unsure, which these images would be.
    assert all(row["probability"] < MIN_PROBABILITY for row in expected if row["label"] == "unknown")
    assert [row["unknown_score"] is None for row in expected] == [row["error"] is not None for row in expected]
    by_name = dict(zip(CONTENTS, expected, strict=True))
    for turned, upright in (("turned", "upright"), ("sixteen", "twelve")):
        found, wanted = (by_name[name]["top_probabilities"] for name in (turned, upright))
        assert np.allclose(found, wanted, rtol=1e-3), turned
    assert [name for name, row in by_name.items() if row["error"]] == ["unknown", "empty", "text", "cut"]
    assert {len(row["top_labels"]) for row in expected} == {0, TOP_K}
    table = str(tmp_path / "contents")
    write_contents(spark, table)
    answers = {
        "one by one": of_one_image_after_the_other(folder),
        "batch": of_batch(spark, storage, table),
        "stream": of_stream(spark, storage, table),
        "spark_udf": of_spark_udf(spark, uri),
        "fresh process": of_fresh_process(uri, storage, tmp_path),
        "http": of_http(uri, storage, tmp_path),
    }
    assert {way: differences(found, expected) for way, found in answers.items()} == {way: [] for way in answers}
