"""Time limits of stages from settings, and locks on the Prefect server, under Prefect's test harness."""

import logging
import logging.handlers
import queue
import threading
import time
from contextvars import copy_context
from typing import get_type_hints

import pytest
from prefect import flow
from prefect.client.orchestration import get_client

from tasks.cache.task import materialize
from tasks.config.promotion import PromoteConfig
from tasks.etl.task import ingest
from tasks.maintenance.task import maintain
from tasks.orchestration.server_lock import limit_name, server_lock
from tasks.orchestration.stage import run_stage, stage
from tasks.predict.task import predict_images
from tasks.registry.task import promote_run
from tasks.system.locks import exclusive_lock


@pytest.fixture(autouse=True)
def _server(prefect_harness):
    """Run all tests of this module against the harness."""


def test_stage_ends_at_the_time_limit_of_its_setting():
    """A stage is timed out by the setting of this run; another run of the same stage has its own."""

    @stage("slow", timeout_in="promote", retries=0)
    def slow(seconds: float, promote: PromoteConfig) -> str:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            time.sleep(0.05)
        return "done"

    @flow
    def both() -> tuple[str, str]:
        state = slow(60, PromoteConfig(timeout_seconds=1), return_state=True)
        return str(state.name), run_stage(slow, 0, PromoteConfig())

    assert both() == ("TimedOut", "done")


def test_flows_in_threads_have_their_own_logs():
    """A run logs its own records and those of threads without a run, also after another run has ended."""
    logger, together = logging.getLogger("lakevision.etl"), threading.Barrier(2, timeout=60)
    first_ended, logged = threading.Event(), logging.handlers.QueueHandler(queue.Queue())
    outside = logging.getLogger("lakevision").level, logging.getLogger("lakevision").propagate

    @stage("log", retries=0)
    def log(name: str) -> None:
        together.wait()
        logger.info("of %s", name)
        together.wait()
        if name == "second":
            assert first_ended.wait(60)
            logger.info("of second, alone")
            alone = threading.Thread(target=logger.info, args=["of a thread"])
            alone.start()
            alone.join()

    @flow
    def logging_flow(name: str) -> None:
        log(name)

    def run(name: str) -> None:
        logging_flow.with_options(flow_run_name=name)(name)
        if name == "first":
            first_ended.set()

    logging.getLogger("prefect.task_runs").addHandler(logged)
    try:
        threads = [
            threading.Thread(target=copy_context().run, args=[run, name])  # the harness is in the context
            for name in ("first", "second")
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        logging.getLogger("prefect.task_runs").removeHandler(logged)
    records = [logged.queue.get() for _ in range(logged.queue.qsize())]
    found = sorted((record.flow_run_name, record.message) for record in records if record.message.startswith("of "))
    assert found == [
        ("first", "of first"),
        ("second", "of a thread"),
        ("second", "of second"),
        ("second", "of second, alone"),
    ]
    assert (logging.getLogger("lakevision").level, logging.getLogger("lakevision").propagate) == outside


def test_stage_that_exceeds_its_time_limit_is_not_retried():
    """A retry would take as long again; a stage that fails for another reason is retried."""
    attempts = []

    @stage("slow", timeout_seconds=0.5)
    def slow() -> None:
        attempts.append("slow")
        while True:
            time.sleep(0.05)

    @stage("fails")
    def fails() -> None:
        attempts.append("fails")
        raise OSError("the disk is busy")

    @flow
    def both() -> None:
        for each in (slow, fails.with_options(retry_delay_seconds=0)):
            each(return_state=True)

    both()
    assert attempts == ["slow", "fails", "fails", "fails"]


@pytest.mark.parametrize(
    "long_stage", [ingest, materialize, predict_images, promote_run, maintain], ids=lambda s: s.name
)
def test_every_long_stage_has_its_time_limit_in_a_setting(long_stage):
    """The setting is one of a parameter of the stage, and a copy with other options keeps it."""
    copy = long_stage.with_options(retries=0)
    config = get_type_hints(copy.fn)[copy.timeout_in]
    assert config().timeout_seconds == 86_400


def test_second_run_waits_until_the_first_releases_the_lock_of_the_server(messages_of, caplog):
    """The concurrency limit is created by the first run that needs it, and has one slot."""
    caplog.set_level("INFO", "lakevision")
    url, order = "s3a://bucket/tables/R&D <50%>", []  # Prefect refuses such characters in a name
    acquired, release = threading.Event(), threading.Event()

    def hold() -> None:
        with server_lock(url):
            acquired.set()
            release.wait(60)
            order.append("first")

    first = threading.Thread(target=copy_context().run, args=[hold])  # the harness is in the context
    first.start()
    assert acquired.wait(60)
    threading.Timer(1, release.set).start()
    with server_lock(url):
        order.append("second")
        with get_client(sync_client=True) as client:
            limit = client.read_global_concurrency_limit_by_name(limit_name(url))
        assert (limit.limit, limit.active_slots) == (1, 1)
    first.join()
    assert order == ["first", "second"]
    (line,) = messages_of("lakevision.locks")
    assert line.startswith(f"another run writes to {url}: waiting until it ends")


def test_stage_locks_shared_locations_on_the_configured_server(tmp_path):
    """A stage has the server's lock for a URL; a folder on a local disk needs none."""

    @stage("write", retries=0)
    def write() -> list[int]:
        found = []
        for url in ("s3a://bucket/tables/files", str(tmp_path / "files")):
            with exclusive_lock(url), get_client(sync_client=True) as client:
                limits = client.read_global_concurrency_limits()
                found.append(sum(limit.active_slots for limit in limits if limit.name == limit_name(url)))
        return found

    @flow
    def writing() -> list[int]:
        return run_stage(write)

    assert writing() == [1, 0]
