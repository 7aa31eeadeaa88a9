"""The images of the inference benchmark as JPEG files and as Delta tables, and the registered model."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from tasks.storage import Storage
from tests.benchmarks.image_folder import write_images

SIDE = 224
BATCH_SIZE = 64
MODEL = "mobilenet_v2"
NUM_CLASSES = 1000
GROWTH_MODEL, GROWTH_SIDE = "small-images", 64
"""Name of the model for the growth of memory, and the side of its images in pixels."""
PART_IMAGES = 250
"""Images per file of a table that repeats images."""


@dataclass(frozen=True)
class Inputs:
    """Files of the benchmark below a folder.

    Attributes:
        folder: The folder.
        count: Number of images of the table, all files or the first.
        model: Name of the registered model.
    """

    folder: Path
    count: int
    model: str = MODEL

    def storage(self) -> Storage:
        """Return the home with the registry."""
        from tasks.config.storage import StorageConfig
        from tasks.storage import resolve_storage

        return resolve_storage(StorageConfig(home=str(self.folder / "home"), tables=str(self.folder / "tables")))

    def files(self) -> list[Path]:
        """Return the JPEG files of the table."""
        return sorted((self.folder / "source").glob("*/*.jpg"), key=lambda file: file.name)[: self.count]

    @property
    def package(self) -> Path:
        """Folder of the model package."""
        return self.folder / f"package-{self.model}"

    @property
    def weights(self) -> Path:
        """File of the state dict, as torch writes it."""
        return self.folder / "weights.pth"

    @property
    def table(self) -> str:
        """Path of the Delta table of images."""
        return str(self.folder / "tables" / f"images-{self.count}")

    @property
    def written(self) -> Path:
        """Folder of the predictions."""
        return self.folder / "written"


def write_source(inputs: Inputs) -> None:
    """Write distinct JPEGs."""
    write_images(inputs.folder / "source", inputs.count)


def write_table(inputs: Inputs) -> None:
    """Write a table of the files with our ETL, which stores them unchanged."""
    from tasks.config.etl import EtlConfig
    from tasks.config.storage import SparkConfig
    from tasks.etl.ingest import ingest_images

    storage = inputs.storage().model_copy(update={"tables": str(inputs.folder / "ingested")})
    etl = EtlConfig(source=str(inputs.folder / "source"), stored_side=1024)
    ingest_images(etl, storage, SparkConfig())
    Path(inputs.table).parent.mkdir(parents=True, exist_ok=True)
    Path(storage.table("images")).rename(inputs.table)


def write_first(inputs: Inputs, table: str) -> None:
    """Write a table of the first `count` rows of another, in one file, as Spark writes it."""
    from tasks.config.storage import SparkConfig
    from tasks.spark.session import spark_session

    with spark_session(SparkConfig(), inputs.storage()) as spark:
        rows = spark.read.format("delta").load(table).orderBy("sha256").limit(inputs.count)
        rows.coalesce(1).write.format("delta").save(inputs.table)


def write_repeated(inputs: Inputs) -> None:
    """Write a table of `count` rows with the contents of the files again and again, under different keys."""
    add_repeated(inputs, 0, inputs.count)


def add_repeated(inputs: Inputs, first: int, count: int) -> None:
    """Add images of these numbers to the table, which is created if it is missing, PART_IMAGES in each commit."""
    import deltalake
    import pyarrow as pa

    files = Inputs(inputs.folder, 1000).files()
    for begin in range(first, first + count, PART_IMAGES):
        numbers = range(begin, min(begin + PART_IMAGES, first + count))
        keys = [hashlib.sha256(f"{number}".encode()).hexdigest() for number in numbers]
        contents = [files[number % len(files)].read_bytes() for number in numbers]
        table = pa.table({"sha256": pa.array(keys, pa.string()), "content": pa.array(contents, pa.binary())})
        feed = {"delta.enableChangeDataFeed": "true"}  # A stream reads it.
        deltalake.write_deltalake(inputs.table, table, mode="append", configuration=feed)


def register_model(inputs: Inputs, side: int = SIDE) -> None:
    """Register a network as champion, with the weights of $LAKEVISION_TEST_DATA if it is set, else random ones."""
    import torch

    from tasks.config.promotion import PromoteConfig
    from tasks.model_package.classifier import save_classifier
    from tasks.model_package.network import build_network
    from tasks.model_package.serving import computes_bf16
    from tasks.refs import RunRef
    from tasks.registry.promote import promote_best
    from tasks.tracking.tracked_run import tracked_run

    storage = inputs.storage()
    network = build_network(MODEL, NUM_CLASSES)
    if data := os.environ.get("LAKEVISION_TEST_DATA"):
        network.network.load_state_dict(torch.load(f"{data}/weights/{MODEL}.pth", weights_only=True))
    torch.save(network.network.state_dict(), inputs.weights)
    classes = [f"class-{number:04d}" for number in range(NUM_CLASSES)]
    precision = "bfloat16" if computes_bf16(torch.device("cpu")) else "float32"
    save_classifier(inputs.package, MODEL, network.state_dict(), classes, side, precision=precision)
    data_of = {"table": "", "version": 0, "table_id": "", "source": "", "content_digest": "x", "rows": {"test": 10}}
    config = {"cache": {"digest": "one"}, "data": data_of}
    with tracked_run(storage, "benchmark", inputs.model, config, {}, None) as run:
        run.log_metrics({"test_accuracy": 0.9, "best_val_accuracy": 0.9}, step=0)
        run.log_model(inputs.package)
    promote_best([RunRef(run_id=run.run_id)], PromoteConfig(model_name=inputs.model), storage)
