"""Registered models, services on them, and clients that ask all the time."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
from PIL import Image

from tasks.config.serving import ServeRun
from tasks.refs import ModelRef, RunRef
from tasks.serve.service import Service, running_service
from tasks.storage import Storage
from tasks.system.listening import free_port
from tasks.tracking import models
from tests.builders.image_bytes import encoded
from tests.builders.untrained_model import log_run

NAME = "photos"

BUSY_SECONDS = 180.0
"""Longest wait for what takes seconds on an idle machine."""


def register(storage: Storage, folder: Path, seed: int, *aliases: str) -> ModelRef:
    """Register a model with random weights, and give it these aliases."""
    return register_again(storage, log_run(storage, folder, seed, 0.9), *aliases)


def register_again(storage: Storage, run: RunRef, *aliases: str) -> ModelRef:
    """Register the model of a run, and give the version these aliases."""
    version = models.register_run(storage, run, NAME)
    for alias in aliases:
        models.set_alias(storage, version, alias)
    return version


def parameters(storage: Storage, **serve: Any) -> ServeRun:
    """Return the parameters of a service of the model on a free port."""
    given = {"port": free_port()} | serve
    return ServeRun.model_validate({"storage": storage.as_config(), "promote": {"model_name": NAME}, "serve": given})


@contextmanager
def service(storage: Storage, **serve: Any) -> Iterator[Service]:
    """Run a service of the model."""
    with running_service(parameters(storage, **serve), storage) as running:
        yield running


@dataclass
class Clients:
    """Clients that send an image again and again, each as soon as the answer has come.

    Attributes:
        answers: Version of each answer.
        ids: Times of the monotonic clock at which each request was sent and answered, by its id.
        failures: What else came.
    """

    url: str
    content: bytes
    answers: list[int] = field(default_factory=list)
    ids: dict[str, tuple[float, float]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    is_over: threading.Event = field(default_factory=threading.Event)

    def ask(self) -> None:
        """Ask until it is over."""
        with httpx.Client(timeout=60, trust_env=False) as client:
            while not self.is_over.is_set():
                try:
                    headers, sent = {"Content-Type": "image/png"}, time.monotonic()
                    answer = client.post(f"{self.url}/predict?top_k=1", content=self.content, headers=headers)
                    answer.raise_for_status()
                    found = answer.json()
                    self.ids[found["request_id"]] = sent, time.monotonic()
                    self.answers.append(found["predictions"][0]["model_version"])
                except httpx.HTTPError as error:
                    self.failures.append(repr(error))

    def wait_for(self, version: int) -> None:
        """Wait until the last 20 answers are of a version."""
        latest = time.monotonic() + BUSY_SECONDS
        while time.monotonic() < latest:
            last = self.answers[-20:]
            if len(last) == 20 and set(last) == {version}:
                return
            time.sleep(0.05)
        raise AssertionError(f"the answers are not of version {version}: {self.answers[-20:]}, {self.failures[-3:]}")


@contextmanager
def asking(url: str, content: bytes, num: int = 4) -> Iterator[Clients]:
    """Run clients for the block."""
    clients = Clients(url, content)
    threads = [threading.Thread(target=clients.ask) for _number in range(num)]
    for thread in threads:
        thread.start()
    try:
        yield clients
    finally:
        clients.is_over.set()
        for thread in threads:
            thread.join()


def until(condition: Callable[[], bool], seconds: float = BUSY_SECONDS) -> None:
    """Wait until a condition holds."""
    latest = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < latest, "the condition does not hold"
        time.sleep(0.05)


def picture(seed: int = 1) -> bytes:
    """Return a PNG of noise, wider than high."""
    return encoded(Image.fromarray(np.random.default_rng(seed).integers(0, 256, (40, 60, 3), dtype=np.uint8)), "PNG")


def workers(running: Service) -> list[psutil.Process]:
    """Return the workers of a service."""
    children = psutil.Process(running.process.pid).children()
    return [child for child in children if "spawn_main" in " ".join(command_of(child))]


def command_of(process: psutil.Process) -> list[str]:
    """Return the command line of a process; none of a process that has ended."""
    try:
        return list(process.cmdline())
    except psutil.Error:  # It has ended.
        return []
