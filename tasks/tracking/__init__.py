"""The only package that knows MLflow's API."""

from tasks.tracking.models import (
    download_model,
    load_package,
    model_with_alias,
    register_run,
    set_alias,
    to_json,
    trained_versions,
)
from tasks.tracking.runs import (
    FLOW_RUN_TAG,
    TrackedRun,
    end_abandoned_runs,
    find_data_checks,
    find_finished_run,
    has_run,
    log_data_checks,
    promotable_runs,
    read_artifact,
    run_location,
    run_metric_sum,
    run_metrics,
    tracked_run,
)
from tasks.tracking.sender import MetricSender, TrackingAway
from tasks.tracking.server import (
    check_tracking,
    prepare_tracking,
)

__all__ = [
    "FLOW_RUN_TAG",
    "MetricSender",
    "TrackedRun",
    "TrackingAway",
    "check_tracking",
    "download_model",
    "end_abandoned_runs",
    "find_data_checks",
    "find_finished_run",
    "has_run",
    "load_package",
    "log_data_checks",
    "model_with_alias",
    "prepare_tracking",
    "promotable_runs",
    "read_artifact",
    "register_run",
    "run_location",
    "run_metric_sum",
    "run_metrics",
    "set_alias",
    "to_json",
    "tracked_run",
    "trained_versions",
]
