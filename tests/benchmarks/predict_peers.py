"""Inference on the images of a folder, ours or a peer's, as a script: `predict_peers.py NAME FOLDER COUNT MODEL`.

It prints the seconds from the call to the written predictions as the last line. The folder is one of predict_data.py.
All peers have 2 processes with a compute thread each. Those on Spark read the same Delta table with Spark's defaults.
"""

import io
import json
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.benchmarks.predict_data import BATCH_SIZE, SIDE, Inputs

NUM_PROCESSES = 2
Answer = dict[str, float]


def ours(inputs: Inputs) -> Answer:
    """Run batch inference; return also its rate without the start of the session."""
    from tasks.config.prediction import PredictConfig
    from tasks.config.promotion import PromoteConfig
    from tasks.config.storage import SparkConfig
    from tasks.predict.batch import predict_batch

    predict = PredictConfig(table=inputs.table, predictions=str(inputs.written), batch_size=BATCH_SIZE)
    with started_session(inputs):
        began = time.perf_counter()
        report = predict_batch(predict, PromoteConfig(model_name=inputs.model), inputs.storage(), SparkConfig())
        seconds = time.perf_counter() - began
    assert (report.predicted, report.errors) == (inputs.count, 0), report
    return {"images_per_second": report.predicted / seconds}


def ours_on_cpu(inputs: Inputs) -> Answer:
    """Run batch inference without the GPUs of this machine."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return ours(inputs)


@contextmanager
def started_session(inputs: Inputs) -> Iterator[None]:
    """Start the session that the work inside uses; it is stopped at the end, like the work's own."""
    from tasks.config.storage import SparkConfig
    from tasks.spark.session import keep_spark, spark_session

    with keep_spark():
        with spark_session(SparkConfig(), inputs.storage()):
            pass
        yield


def stream(inputs: Inputs) -> Answer:
    """Run streaming inference to its end; return also its rate without the start of the session."""
    return _stream(inputs, None)


def endless_stream(inputs: Inputs) -> Answer:
    """Run streaming inference with a batch each second, until it is interrupted."""
    with suppress(KeyboardInterrupt):
        _stream(inputs, 1)
    return {}


def _stream(inputs: Inputs, interval_seconds: int | None) -> Answer:
    from tasks.config.prediction import PredictConfig, StreamConfig
    from tasks.config.promotion import PromoteConfig
    from tasks.config.storage import SparkConfig
    from tasks.stream.predict import predict_stream

    predict = PredictConfig(table=inputs.table, predictions=str(inputs.written), batch_size=BATCH_SIZE)
    promote, settings = PromoteConfig(model_name=inputs.model), StreamConfig(interval_seconds=interval_seconds)
    with started_session(inputs):
        began = time.perf_counter()
        report = predict_stream(settings, predict, promote, inputs.storage(), SparkConfig())
        seconds = time.perf_counter() - began
    assert (report.predicted, report.errors) == (inputs.count, 0), report
    return {"images_per_second": report.predicted / seconds}


def _bare_part(
    package: str, files: list[str], batch_size: int, pixels_per_pass: int | None
) -> tuple[list[tuple[int, float]], float]:
    """Return the class and probability of each file, and the seconds of the loop alone."""
    import numpy as np
    import torch

    from tasks.model_package import serving
    from tasks.model_package.classifier import ImageClassifier
    from tasks.model_package.decode import decode_pixels

    torch.set_num_threads(1)
    serving.PIXELS_PER_PASS = pixels_per_pass  # type: ignore[assignment]  # None: whole batches, in this process alone
    classifier = ImageClassifier.load(Path(package))
    found: list[tuple[int, float]] = []
    began = time.perf_counter()
    for first in range(0, len(files), batch_size):
        pixels = [
            decode_pixels(Path(file).read_bytes(), classifier.image_size) for file in files[first : first + batch_size]
        ]
        most = torch.softmax(classifier.logits(torch.from_numpy(np.stack(pixels))), dim=1).max(1)
        found += zip(most.indices.tolist(), most.values.tolist(), strict=True)
    return found, time.perf_counter() - began


def bare(inputs: Inputs) -> Answer:
    """Run a loop over the files in two processes, with our decoding, folding and precision; write a Parquet file."""
    return _bare(inputs, None)


def bare_in_passes(inputs: Inputs) -> Answer:
    """Run the same loop with as many images in a pass of the network as we compute at once."""
    from tasks.model_package.serving import PIXELS_PER_PASS

    return _bare(inputs, PIXELS_PER_PASS)


def _bare(inputs: Inputs, pixels_per_pass: int | None) -> Answer:
    import pyarrow as pa
    import pyarrow.parquet as pq

    files = [str(file) for file in inputs.files()]
    parts = [files[number::NUM_PROCESSES] for number in range(NUM_PROCESSES)]
    with multiprocessing.get_context("spawn").Pool(NUM_PROCESSES) as pool:
        done = pool.starmap(_bare_part, [(str(inputs.package), part, BATCH_SIZE, pixels_per_pass) for part in parts])
    rows = [row for found, _seconds in done for row in found]
    paths = [file for part in parts for file in part]
    table = pa.table({"path": paths, "index": [row[0] for row in rows], "probability": [row[1] for row in rows]})
    inputs.written.mkdir(parents=True)
    pq.write_table(table, inputs.written / "predictions.parquet")
    return {"images_per_second": len(files) / max(seconds for _found, seconds in done)}


def packaged_udf(inputs: Inputs) -> Answer:
    """Run the UDF that MLflow makes of the registered model, which has our decoding, precision and folded layers."""
    return _spark_udf(inputs, f"models:/{inputs.model}@champion")


def _spark_udf(inputs: Inputs, model: str) -> Answer:
    import mlflow

    from tests.benchmarks.etl_peers import default_session

    mlflow.set_tracking_uri(inputs.storage().tracking)
    spark = default_session()
    began = time.perf_counter()
    predictor = mlflow.pyfunc.spark_udf(spark, model, env_manager="local")
    images = spark.read.format("delta").load(inputs.table)
    images.select("sha256", predictor("content").alias("answer")).write.format("delta").save(str(inputs.written))
    return {"images_per_second": inputs.count / (time.perf_counter() - began)}


def _plain_network(weights: str) -> Any:
    """Return torchvision's network in float32, with the weights of the registered model."""
    import torch
    import torchvision

    network = torchvision.models.mobilenet_v2(weights=None)
    network.load_state_dict(torch.load(weights, weights_only=True))
    return network.eval()


def _plain_answers(network: Any, contents: Any) -> Any:
    """Return the index of the class of each image, with PIL and torchvision as in the recipe."""
    import torch
    from PIL import Image
    from torchvision.transforms import v2

    transform = v2.Compose(
        [
            v2.PILToTensor(),
            v2.ToDtype(torch.float, scale=True),
            v2.Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)),
        ]
    )

    def pixels(content: bytes) -> Any:
        image = Image.open(io.BytesIO(content)).convert("RGB")
        image.thumbnail((SIDE, SIDE))
        canvas = Image.new("RGB", (SIDE, SIDE), (255, 255, 255))
        canvas.paste(image, ((SIDE - image.width) // 2, (SIDE - image.height) // 2))
        return transform(canvas)

    with torch.no_grad():
        return network(torch.stack([pixels(content) for content in contents])).argmax(1).numpy()


def _plain_batches(network: Any, contents: Any) -> Any:
    """Return the index of the class of each image of a series, in batches."""
    import pandas as pd

    parts = (contents.iloc[first : first + BATCH_SIZE] for first in range(0, len(contents), BATCH_SIZE))
    return pd.concat([pd.Series(_plain_answers(network, part)) for part in parts], ignore_index=True)


def spark_udf(inputs: Inputs) -> Answer:
    """Run the UDF that MLflow makes of torchvision's network with the recipe's decoding."""
    import mlflow
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, DataType, Schema

    class PlainModel(mlflow.pyfunc.PythonModel):
        def load_context(self, context: Any) -> None:
            self.network = _plain_network(context.artifacts["weights"])

        def predict(self, context: Any, model_input: Any, params: Any = None) -> Any:
            return _plain_batches(self.network, model_input["content"])

    signature = ModelSignature(Schema([ColSpec(DataType.binary, "content")]), Schema([ColSpec(DataType.long)]))
    folder = inputs.folder / "plain-model"
    artifacts, packages = {"weights": str(inputs.weights)}, ["torch", "torchvision", "pillow"]
    mlflow.pyfunc.save_model(
        folder, python_model=PlainModel(), artifacts=artifacts, signature=signature, pip_requirements=packages
    )
    try:
        return _spark_udf(inputs, str(folder))
    finally:
        shutil.rmtree(folder)


def predict_batch_udf(inputs: Inputs) -> Answer:
    """Run Spark's `predict_batch_udf` around torchvision's network."""
    from pyspark.ml.functions import predict_batch_udf as make_udf
    from pyspark.sql.types import LongType

    from tests.benchmarks.etl_peers import default_session

    spark, weights = default_session(), str(inputs.weights)
    began = time.perf_counter()

    def make_predictor() -> Callable[[Any], Any]:
        network = _plain_network(weights)
        return lambda contents: _plain_answers(network, contents)

    predictor = make_udf(make_predictor, return_type=LongType(), batch_size=BATCH_SIZE)
    images = spark.read.format("delta").load(inputs.table)
    images.select("sha256", predictor("content").alias("index")).write.format("delta").save(str(inputs.written))
    return {"images_per_second": inputs.count / (time.perf_counter() - began)}


def recipe(inputs: Inputs) -> Answer:
    """Run the published recipe: a pandas UDF around the model, float32, on the table of images."""
    import pandas as pd
    from pyspark.sql.functions import pandas_udf

    from tests.benchmarks.etl_peers import default_session

    spark, weights = default_session(), str(inputs.weights)
    began = time.perf_counter()

    @pandas_udf("long")  # type: ignore[call-overload]  # PySpark's overloads lack it
    def predictor(batches: Iterator[pd.Series]) -> Iterator[pd.Series]:
        network = _plain_network(weights)
        for contents in batches:
            yield _plain_batches(network, contents)

    images = spark.read.format("delta").load(inputs.table)
    images.select("sha256", predictor("content").alias("index")).write.format("delta").save(str(inputs.written))
    return {"images_per_second": inputs.count / (time.perf_counter() - began)}


def empty_udf(_inputs: Inputs) -> Answer:
    """Run a pandas UDF that returns its input in a session with Spark's defaults."""
    import pandas as pd
    from pyspark.sql.functions import pandas_udf

    from tests.benchmarks.etl_peers import default_session

    spark = default_session()

    @pandas_udf("long")  # type: ignore[call-overload]  # PySpark's overloads lack it
    def same(numbers: pd.Series) -> pd.Series:
        return numbers

    assert len(spark.range(64).select(same("id")).collect()) == 64
    return {}


PEERS: dict[str, Callable[[Inputs], Answer]] = {
    "ours": ours,
    "ours_on_cpu": ours_on_cpu,
    "stream": stream,
    "endless_stream": endless_stream,
    "bare": bare,
    "bare_in_passes": bare_in_passes,
    "packaged_udf": packaged_udf,
    "spark_udf": spark_udf,
    "predict_batch_udf": predict_batch_udf,
    "recipe": recipe,
    "empty_udf": empty_udf,
}


def main() -> None:
    """Predict, print the costs, and remove what was written."""
    name, inputs = sys.argv[1], Inputs(Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    began = time.perf_counter()
    found = PEERS[name](inputs)
    seconds = time.perf_counter() - began
    for folder in (inputs.written, Path(f"{inputs.written}.streams")):
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(found | {"seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
