"""MLflow runs that stayed running although the process that tracked them is gone."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from sqlalchemy import make_url

from tasks.storage import Storage
from tasks.tracking.experiments import DATA, TRAINING
from tasks.tracking.runs import FLOW_RUN_TAG
from tasks.tracking.server import client_of, reachable

EndStatus = Literal["FAILED", "KILLED"]
"""Status of an MLflow run whose process ended without setting one."""

logger = logging.getLogger("lakevision.tracking")


def end_lost_runs(storage: Storage, status: Callable[[str], EndStatus | None]) -> list[str]:
    """End the running MLflow runs of flow runs that have ended, and return their ids.

    Args:
        storage: Storage with the tracking URI.
        status: Returns the status for an MLflow run from the id of its flow run; None if that has not ended.

    Raises:
        TrackingUnavailable: The tracking server does not answer.
    """
    if not _exists(storage):
        return []
    client, ended = client_of(storage), []
    with reachable(storage):
        found = [client.get_experiment_by_name(experiment.name) for experiment in (TRAINING, DATA)]
        experiments = [str(experiment.experiment_id) for experiment in found if experiment is not None]
        runs = client.search_runs(experiments, "attributes.status = 'RUNNING'") if experiments else []
        for run in runs:
            flow_run = run.data.tags.get(FLOW_RUN_TAG)
            if flow_run is not None and (end := status(flow_run)) is not None:
                client.set_terminated(run.info.run_id, end)
                logger.info("MLflow run %s has lost its process: marked as %s", run.info.run_id, end)
                ended.append(str(run.info.run_id))
    return ended


def _exists(storage: Storage) -> bool:
    """Return whether there may be runs: a client would create a database file that is missing."""
    if not storage.tracking.startswith("sqlite:"):
        return True
    name = make_url(storage.tracking).database
    return bool(name) and Path(str(name)).exists()
