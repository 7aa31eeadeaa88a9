"""ETL over a folder of JPEGs, ours or a peer's, as a script: `etl_peers.py NAME SOURCE TARGET`."""

import hashlib
import io
import os
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SIDE = 224
"""The `stored_side` of all, which decode, resize and encode in the same way."""


def ours(source: str, target: str) -> None:
    """Run our ETL: listing, ledger, checks, split, both tables."""
    from tasks.config.etl import EtlConfig
    from tasks.config.storage import SparkConfig, StorageConfig
    from tasks.etl.ingest import ingest_images
    from tasks.storage import resolve_storage

    etl = EtlConfig(source=source, stored_side=SIDE)
    ingest_images(etl, resolve_storage(StorageConfig(home=target)), SparkConfig())


def default_session() -> "SparkSession":
    """Return a session with Spark's defaults, Delta, and the same heap as ours."""
    from pyspark.sql import SparkSession

    from tasks.spark.jvm import jars_folder

    os.environ["PYSPARK_PYTHON"] = sys.executable
    return (
        SparkSession.builder.master("local[*]")
        .config("spark.jars", ",".join(str(jar) for jar in jars_folder().glob("*.jar")))
        .config("spark.sql.extensions", "io.delta.sql.DeltaSparkSessionExtension")
        .config("spark.sql.catalog.spark_catalog", "org.apache.spark.sql.delta.catalog.DeltaCatalog")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.memory", "3g")
        .getOrCreate()
    )


def recipe(source: str, target: str) -> None:
    """Run the published recipe: binaryFile, a pandas UDF with PIL, randomSplit, two Delta tables, Spark's defaults."""
    import pandas as pd
    from PIL import Image
    from pyspark.sql.functions import pandas_udf

    spark = default_session()

    def standardize(content: bytes) -> bytes:
        image = Image.open(io.BytesIO(content)).convert("RGB")
        image.thumbnail((SIDE, SIDE))
        canvas = Image.new("RGB", (SIDE, SIDE), (255, 255, 255))
        canvas.paste(image, ((SIDE - image.width) // 2, (SIDE - image.height) // 2))
        buffer = io.BytesIO()
        canvas.save(buffer, format="JPEG")
        return buffer.getvalue()

    @pandas_udf("binary")  # type: ignore[call-overload]  # PySpark's overloads lack it
    def standardized(contents: pd.Series) -> pd.Series:
        return contents.apply(standardize)

    rows = (
        spark.read.format("binaryFile")
        .option("pathGlobFilter", "*.jpg")
        .option("recursiveFileLookup", "true")
        .load(source)
        .select("path", standardized("content").alias("content"))
    )
    train, val = rows.randomSplit([0.9, 0.1], seed=42)
    train.write.format("delta").save(f"{target}/train")
    val.write.format("delta").save(f"{target}/val")
    spark.stop()


def _convert(path: str) -> tuple[str, str, bytes]:
    from tasks.etl.extract import store_image

    content = Path(path).read_bytes()
    return path, hashlib.sha256(content).hexdigest(), store_image(content, SIDE).content


def pool(source: str, target: str) -> None:
    """Run a plain process pool with our decode, resize and encode, and one Parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([("path", pa.string()), ("sha256", pa.string()), ("content", pa.binary())])
    paths = sorted(str(path) for path in Path(source).rglob("*.jpg"))
    Path(target).mkdir(parents=True)
    with ProcessPoolExecutor() as workers, pq.ParquetWriter(f"{target}/images.parquet", schema) as writer:

        def batches() -> Iterator[list[tuple[str, str, bytes]]]:
            rows = []
            for row in workers.map(_convert, paths, chunksize=32):
                rows.append(row)
                if len(rows) == 1024:
                    yield rows
                    rows = []
            yield rows

        for rows in batches():
            if rows:
                columns = [list(column) for column in zip(*rows, strict=True)]
                writer.write_table(pa.Table.from_arrays([pa.array(column) for column in columns], schema=schema))


PEERS = {"ours": ours, "recipe": recipe, "pool": pool}

if __name__ == "__main__":
    tempfile.tempdir = str(Path(sys.argv[3]).parent)
    PEERS[sys.argv[1]](sys.argv[2], sys.argv[3])
