"""The walks of a reader through the code are short."""

from pathlib import Path

from pyspark.sql import SparkSession

from tasks.storage import Storage
from tests.walks import INFERENCE, walk_of_prediction


def test_prediction_of_an_image_is_read_in_few_files(spark: SparkSession, storage: Storage, tmp_path: Path) -> None:
    """From the settings over the image's bytes to its prediction, a reader enters few files, and seldom returns."""
    found = walk_of_prediction(storage, tmp_path).within(*INFERENCE)

    assert {"tasks/predict/batch.py", "tasks/model_package/decode.py"} <= {file for file, _function in found.steps}
    assert found.num_files <= 13, found.steps
    assert found.num_returns <= 19, found.steps
