"""Flows as plain Python calls, under Prefect's test harness."""

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter

from flows.etl import etl
from tasks.config import EtlConfig, EtlRun, StorageConfig
from tasks.errors import WrongInput
from tasks.orchestration.task import stage


@pytest.fixture(autouse=True)
def _server(prefect_harness):
    """Run every test here against the harness."""


def run_etl(storage, source):
    """Run the flow and return its state."""
    config = EtlRun(storage=StorageConfig(home=storage.home), etl=EtlConfig(source=str(source)))
    return etl(config, return_state=True)


def test_the_etl_flow_says_when_it_was_skipped_and_shows_the_data_set(spark, storage, source):
    """A second run of the same thing skips what is done, and says so."""
    first = run_etl(storage, source)
    assert first.result().stored == 60
    second = run_etl(storage, source)
    assert second.result().changed is False
    with get_client(sync_client=True) as client:
        wanted = ArtifactFilter.model_validate({"key": {"any_": ["data-set", "data-validation"]}})
        artifacts = client.read_artifacts(artifact_filter=wanted)
    found = {artifact.key: str(artifact.data) for artifact in artifacts}
    assert '"class": "red"' in found["data-set"]
    assert '"check": "leaked", "value": "0"' in found["data-validation"]


def test_wrong_input_is_not_retried_and_other_errors_are(monkeypatch):
    """Running again cannot help a person who made a mistake."""
    from prefect import flow

    calls = {"wrong": 0, "lost": 0}

    @stage("wrong")
    def wrong() -> None:
        calls["wrong"] += 1
        raise WrongInput("a sentence")

    @stage("lost")
    def lost() -> None:
        calls["lost"] += 1
        raise ConnectionError("lost")

    @flow
    def both() -> None:
        wrong(return_state=True)
        lost.with_options(retry_delay_seconds=0)(return_state=True)

    both(return_state=True)
    assert calls == {"wrong": 1, "lost": 3}


def test_logs_of_plain_functions_and_of_spark_workers_reach_the_run(spark, storage, source):
    """A person looks in one place."""
    import time

    state = run_etl(storage, source)
    flow_run_id = state.state_details.flow_run_id
    wanted: list[str] = []
    deadline = time.monotonic() + 30
    with get_client(sync_client=True) as client:
        while time.monotonic() < deadline and not any("worker: read" in line for line in wanted):
            from prefect.client.schemas.filters import LogFilter

            found = client.read_logs(LogFilter.model_validate({"flow_run_id": {"any_": [flow_run_id]}}))
            wanted = [record.message for record in found]
            time.sleep(0.5)
    assert any("60 files in" in line for line in wanted)
    assert any("worker: read" in line for line in wanted)
