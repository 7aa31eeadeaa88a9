"""Submitted runs and an outage of the server that is longer than all retries of its clients."""

import re
import subprocess
import sys
import time
from pathlib import Path

from prefect.client.schemas.actions import WorkPoolUpdate

from tasks.config.storage import StorageConfig
from tasks.storage import resolve_storage
from tests.builders.hand_made_cache import hand_made_cache
from tests.builders.killed_training import runs_in
from tests.builders.processes import ROOT
from tests.builders.submissions import (
    WAIT_SECONDS,
    client_of,
    end_worker,
    kill_server,
    process_of,
    restart_server,
    running_server,
    start_submitter,
    start_worker,
    states,
    submitted_name,
    wait_until,
)
from tests.builders.submitted_training import training_stack

OUTAGE_SECONDS = 100.0
"""Prefect's clients repeat a request for about a minute."""


def test_outage_longer_than_all_retries_is_waited_out(tmp_path: Path) -> None:
    """The submitted run completes after the outage and was submitted once; its worker, without retries, waits too."""
    with running_server(tmp_path / "home") as stack:
        worker = start_worker(stack, client_retries=0)
        submitter = start_submitter(stack, tmp_path / "run", OUTAGE_SECONDS + 60)
        process_of(tmp_path / "run")
        kill_server(stack)
        time.sleep(OUTAGE_SECONDS)
        restart_server(stack)
        log = (stack.home / "logs" / "worker-gpu.log").read_text()
        assert "the Prefect server does not answer: the worker waits for it, and its runs continue" in log
        printed, _ = submitter.communicate(timeout=WAIT_SECONDS)
        end_worker(stack, worker)
        assert submitter.returncode == 0, printed
        assert printed.count("the Prefect server does not answer") == 1
        assert printed.count("the Prefect server answers again") == 1
        assert states(stack) == {submitted_name(printed): "COMPLETED"}


SEARCH = """
import sys
from prefect import flow
from tasks.config.storage import StorageConfig
from tasks.config.tune import Choices, TuneConfig
from tasks.refs import CacheRef
from tasks.storage import resolve_storage
from tasks.tune.space import study_name
from tasks.tune.study import open_study, trial_rows
from tasks.tune.task import search_best
from tests.builders.killed_training import TRAIN

storage, cache = resolve_storage(StorageConfig()), CacheRef(url=sys.argv[1], digest=sys.argv[2])
train = TRAIN.model_copy(update={"max_epochs": 300, "patience": 300})
tune = TuneConfig(
    search={"learning_rate": Choices(choices=[1e-7, 2e-7])}, num_trials=2, parallel=2, min_epochs=300,
    submit_timeout_seconds=100,
)

@flow
def only_search():
    search_best(train, tune, cache, storage)

only_search()
study = open_study(storage, study_name(train, tune, cache), train, tune, create=False)
print("trials", [row["state"] for row in trial_rows(study)])
"""
"""Code of a search whose two trials run at once; its arguments are URL and digest of a cache."""


def test_search_waits_out_an_outage_longer_than_all_retries(make_images, tmp_path: Path) -> None:
    """Its running trials count as trained, and neither is submitted or trained twice."""
    with training_stack(tmp_path / "home") as (stack, _worker):
        with client_of(stack) as client:
            client.update_work_pool("gpu", WorkPoolUpdate(concurrency_limit=2))
        cache = hand_made_cache(make_images(), str(tmp_path / "cache"))
        storage = resolve_storage(StorageConfig(home=str(stack.home)))
        search = subprocess.Popen(
            [sys.executable, "-c", SEARCH, cache.url, cache.digest],
            cwd=ROOT,
            env=stack.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            # The run of the search, and one for each trial.
            wait_until(lambda: search.poll() is not None or len(runs_in(storage)) == 3)
            kill_server(stack)
            time.sleep(OUTAGE_SECONDS)
            restart_server(stack)
            printed, _ = search.communicate(timeout=3 * WAIT_SECONDS)
        finally:
            search.kill()
            search.wait()
        assert search.returncode == 0, printed
        assert printed.splitlines()[-1] == "trials ['complete', 'complete']"
        assert "the Prefect server does not answer" in printed
        assert [status for _run, status in runs_in(storage)] == ["FINISHED"] * 3
        with client_of(stack) as client:
            trials = [run for run in client.read_flow_runs() if re.match(r"trial-\d", run.name)]
        assert [run.state.type.value for run in trials if run.state is not None] == ["COMPLETED"] * 2
