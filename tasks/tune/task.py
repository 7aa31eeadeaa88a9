"""Hyper-parameter search as Prefect tasks: trials run on the GPU work pool or in place."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from prefect.artifacts import create_table_artifact

from tasks.config.recipe import monitored
from tasks.config.train import TrainConfig
from tasks.config.tune import TrialRun, TuneConfig, TuneRun
from tasks.launch.launcher import launch_ranks
from tasks.launch.task import train_on_pool
from tasks.orchestration.pool_settings import runs_per_worker
from tasks.orchestration.pools import check_pool, read_pool, where_to_run
from tasks.orchestration.stage import flow_run_tags, publish_mlflow_page, skipped, stage
from tasks.orchestration.submission import SubmittedRun, submit
from tasks.refs import CacheRef, RunRef, TableRef, TrialReport
from tasks.storage import Storage
from tasks.system.cores import gpus_for
from tasks.system.slots import take_slot
from tasks.text.markup import in_cells
from tasks.tracking.runs import find_finished_run, run_location
from tasks.tracking.searches import trial_tags
from tasks.tracking.server import check_tracking
from tasks.train.spec import TrainingSpec, run_keys
from tasks.tune.search import RunningTrial, SearchResult, TrialStart, TrialThread, search_parameters
from tasks.tune.space import check_search, check_search_sizes
from tasks.tune.trial import run_trial

logger = logging.getLogger("lakevision.tune")


@stage("check-search", timeout_seconds=1800)
def check_searchable(config: TuneRun, storage: Storage) -> None:
    """Check tracking server, models, weights and work pool, before a cache is built."""
    check_tracking(storage)
    on_pool = where_to_run(config.tune) == "work_pool"
    check_search(config, here=not on_pool)
    if on_pool:
        check_pool(config.tune, "tune", "the search")


@stage("check-batches", timeout_seconds=1800)
def check_drawn_batches_fit(config: TuneRun, images: TableRef) -> None:
    """Check that no trial may draw a batch larger than the number of training images, before a cache is built."""
    check_search_sizes(config, images)


def _submit_trial(start: TrialStart) -> SubmittedRun:
    spec = start.spec
    config = TrialRun(
        storage=spec.storage.as_config(),
        train=spec.train,
        tune=start.tune,
        study=start.study,
        number=start.number,
        parent_run_id=start.parent_run_id,
    )
    parameters = {"config": config.model_dump(), "cache_ref": spec.cache.model_dump()}
    return submit(start.tune, "tune", "trial", parameters, name=f"trial-{start.number}-{start.study}")


@stage("search", timeout_seconds=None)
def search_best(train: TrainConfig, tune: TuneConfig, cache: CacheRef, storage: Storage) -> TrainConfig:
    """Run the trials of the search, publish all of them, and return the best settings."""
    in_thread = partial(TrialThread, num_slots=tune.parallel)
    start: Callable[[TrialStart], RunningTrial] = _submit_trial if where_to_run(tune) == "work_pool" else in_thread
    result = search_parameters(train, tune, cache, storage, start, flow_run_tags())
    publish_search(result, sorted(tune.space), storage)
    return result.best


def publish_search(result: SearchResult, searched: Sequence[str], storage: Storage) -> None:
    """Publish a table of all trials, a table of the best settings, and a link to the parent MLflow run."""
    monitor = monitored(result.best)
    best: list[dict[str, Any]] = [
        {"setting": f"train.{name}", "value": getattr(result.best, name)} for name in searched
    ]
    best.append({"setting": monitor, "value": result.value})
    for key, rows, what in (("tune-trials", result.rows, "Trials by"), ("tune-best", best, "Best settings and their")):
        about = f"{what} {monitor}, MLflow run {result.run_id}"
        create_table_artifact(table=[in_cells(row) for row in rows], key=key, description=about)
    location = run_location(storage, RunRef(run_id=result.run_id))
    about = "The search in MLflow, with the run of each trial below it"
    publish_mlflow_page(storage, location, "tune-run", "MLflow run of the search", about)


@stage("train-best-on-pool", timeout_seconds=None)
def submit_best(train: TrainConfig, tune: TuneConfig, cache: CacheRef, storage: Storage) -> bool:
    """Train the best settings in full on the work pool of the trials, and return whether a run was submitted.

    Nothing is submitted if the trials run in place, or if a finished run has these settings.
    """
    keys = run_keys(train, cache, None)
    if found := find_finished_run(storage, *keys):
        return skipped(False, f"MLflow run {found.run_id} has already completed this training run")
    if where_to_run(tune) == "in_place":
        return skipped(False, "without a work pool the best settings are trained in place")
    config = TrialRun(storage=storage.as_config(), train=train, tune=tune)
    parameters = {"config": config.model_dump(), "cache_ref": cache.model_dump()}
    train_on_pool(tune, "tune", parameters, storage, keys, name=f"best-{keys[0]}")
    return True


@stage("train-trial", timeout_seconds=None, retries=0)
def train_trial_here(config: TrialRun, cache: CacheRef, storage: Storage) -> TrialReport:
    """Train a trial of a study, or the best settings in full; the search decides whether a failed trial is retried."""
    tags = flow_run_tags()
    if config.parent_run_id is not None:
        tags |= trial_tags(config.parent_run_id, config.number)
    spec = TrainingSpec(train=config.train, distributed=None, cache=cache, storage=storage, tags=tags)
    with take_slot(gpus_for(config.train.device), config.train.timeout_seconds) as slot:
        # Runs in lower slots share the machine at the same time, even those of another search.
        num_slots = max(_trials_here(config), slot.number + 1)
        logger.info("this training run has slot %d of %d on its machine", slot.number + 1, num_slots)
        return _train_trial(spec.model_copy(update={"slot": slot, "num_slots": num_slots}), config)


def _trials_here(config: TrialRun) -> int:
    """Return the expected number of concurrent trials of the search on this machine."""
    if config.study is None or config.tune.parallel == 1 or where_to_run(config.tune) == "in_place":
        return 1
    return runs_per_worker(config.tune.parallel, *read_pool(config.tune.work_pool, "tune"))


def _train_trial(spec: TrainingSpec, config: TrialRun) -> TrialReport:
    if config.study is None or config.number is None:
        run = launch_ranks(spec)
        return TrialReport(number=None, state="complete", value=None, run_id=run.run_id)
    return run_trial(spec, config.study, config.number, config.tune)
