"""The only package that knows MLflow's API."""

from tasks.tracking.data_checks import find_data_checks, log_data_checks
from tasks.tracking.kept import trained_versions
from tasks.tracking.models import (
    download_model,
    load_package,
    model_with_alias,
    register_run,
    set_alias,
    to_json,
)
from tasks.tracking.runs import (
    BATCH_SIZE_TAG,
    FLOW_RUN_TAG,
    GONE_ON_TAG,
    SYSTEM_METRICS,
    code_commit,
    end_abandoned_runs,
    find_begun_run,
    find_finished_run,
    has_run,
    package_versions,
    promotable_runs,
    read_artifact,
    run_location,
    run_metrics,
    versions_in,
)
from tasks.tracking.searches import (
    ParentRun,
    find_newest_run,
    mark_pruned,
    parent_run,
    trial_tags,
)
from tasks.tracking.sender import MetricSender
from tasks.tracking.server import (
    answers,
    away_named,
    check_tracking,
    prepare_tracking,
)
from tasks.tracking.tracked_run import TrackedRun, tracked_run
from tasks.tracking.trained import (
    REPEAT_TAG,
    LoggedTraining,
    download_weights,
    logged_training,
    newest_training,
)

__all__ = [
    "BATCH_SIZE_TAG",
    "FLOW_RUN_TAG",
    "GONE_ON_TAG",
    "REPEAT_TAG",
    "SYSTEM_METRICS",
    "LoggedTraining",
    "MetricSender",
    "ParentRun",
    "TrackedRun",
    "answers",
    "away_named",
    "check_tracking",
    "code_commit",
    "download_model",
    "download_weights",
    "end_abandoned_runs",
    "find_begun_run",
    "find_data_checks",
    "find_finished_run",
    "find_newest_run",
    "has_run",
    "load_package",
    "log_data_checks",
    "logged_training",
    "mark_pruned",
    "model_with_alias",
    "newest_training",
    "package_versions",
    "parent_run",
    "prepare_tracking",
    "promotable_runs",
    "read_artifact",
    "register_run",
    "run_location",
    "run_metrics",
    "set_alias",
    "to_json",
    "tracked_run",
    "trained_versions",
    "trial_tags",
    "versions_in",
]
