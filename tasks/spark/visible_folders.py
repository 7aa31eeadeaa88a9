"""The check that all executors of a cluster see a local folder of the driver."""

import os
import socket
import tempfile

from pyspark.sql import SparkSession

from tasks.errors import WrongInput
from tasks.object_store import PROBE
from tasks.paths import local_path
from tasks.spark.cluster import is_local, num_task_slots
from tasks.system.disk import existing_folder

TASKS_PER_SLOT = 2
"""Tasks of the check per task slot, so that every executor gets one."""


def check_visible(spark: SparkSession, folder: str, setting: str) -> None:
    """Check that all executors see what the driver writes to a folder, by writing a temporary file there.

    Executors would otherwise write to folders of the same name on their own machines, which the driver does not see.
    Nothing is checked for a URL, or for a local session. A folder that does not exist yet is checked at its nearest
    existing parent.

    Raises:
        WrongInput: An executor does not see the folder.
    """
    place = existing_folder(folder)
    if place is not None and not is_local(str(spark.sparkContext.master)):
        with tempfile.NamedTemporaryFile(prefix=PROBE, dir=place) as mark:
            _check_on_executors(spark, mark.name, folder, setting)


def check_file_visible(spark: SparkSession, folder: str, file: str, setting: str) -> None:
    """Check that all executors see a file of a folder that the driver only reads; as `check_visible`.

    Args:
        spark: The session.
        folder: Folder or URL.
        file: Path of an existing file, relative to the folder.
        setting: Name of the setting of the folder.

    Raises:
        WrongInput: An executor does not see the file.
    """
    place = local_path(folder)
    if place is not None and not is_local(str(spark.sparkContext.master)):
        _check_on_executors(spark, str((place / file).absolute()), folder, setting)


def _check_on_executors(spark: SparkSession, file: str, folder: str, setting: str) -> None:
    def host_without_file(_number: int) -> str | None:
        return None if os.path.exists(file) else socket.gethostname()

    tasks = TASKS_PER_SLOT * num_task_slots(spark)
    hosts = set(spark.sparkContext.parallelize(range(tasks), tasks).map(host_without_file).collect()) - {None}
    if hosts and os.path.exists(file):  # deleted in between, it would be missing everywhere
        raise WrongInput(
            f"{setting} is '{folder}', which Spark's executors on {', '.join(sorted(map(str, hosts)))} do not see: "
            "give a folder with the same path on the driver and on every executor, or a URL"
        )
