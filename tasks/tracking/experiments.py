"""The two MLflow experiments, of training runs and of data validations, with their views in MLflow's UI."""

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import mlflow
from mlflow.exceptions import MlflowException
from mlflow.utils.mlflow_tags import MLFLOW_RUN_NOTE

from tasks.errors import WrongInput, loggable

logger = logging.getLogger("lakevision.tracking")

KIND_TAG, TRAINING_KIND = "mlflow.experimentKind", "custom_model_development"
"""Tag and value by which MLflow recognizes an experiment with training runs of models."""

WORKFLOW = "workflowType=machine_learning"
"""Query parameter of links: without it, MLflow 3.17 shows a new browser its traces of language models, whatever the
experiment's kind."""

VIEW_TAG = "mlflow.sharedViewState."
"""Prefix of the tags that hold the saved views of a run list."""

VIEW = "lakevision"
"""Id of the saved view; MLflow's default run list shows no metrics until a user selects some."""


class ExperimentDeleted(WrongInput):
    """A user deleted an experiment in MLflow, which keeps its name and its runs until they are purged."""


@dataclass(frozen=True)
class Experiment:
    """An experiment and the saved view of its run list."""

    name: str
    about: str
    """Description of the experiment, in Markdown."""
    view: str
    """Name of the saved view."""
    metrics: Sequence[str]
    """Metrics that the view shows as columns."""
    params: Sequence[str] = ()
    """Parameters that it shows after them."""


TRAINING = Experiment(
    name="lakevision",
    about="Training runs. The saved view **Results** lists their metrics; data validations are in the experiment "
    "`lakevision-data`.",
    view="Results",
    metrics=("best_val_accuracy", "test_accuracy", "test_macro_f1"),
    params=("train.weights", "cache.image_size", "train.batch_size", "train.learning_rate", "data.source"),
)

DATA = Experiment(
    name="lakevision-data",
    about="Data validations: one run per version of the tables. The saved view **Checks** lists their metrics; "
    "training runs are in the experiment `lakevision`.",
    view="Checks",
    metrics=("images", "classes", "imbalance_ratio", "quarantined_fraction", "duplicates", "near_duplicates"),
)


def prepare_experiment(client: mlflow.MlflowClient, experiment: Experiment, location: str | None) -> str:
    """Create the experiment if it is missing, with its artifacts at `location`, and return its id.

    Without a location, the tracking server chooses its own.

    Changes that a user made in the UI (kind, description, view) are kept.

    Raises:
        ExperimentDeleted: It was deleted.
    """
    found = client.get_experiment_by_name(experiment.name)
    if found is None:
        if renamed := renamed_experiments(client, experiment):
            logger.warning("the experiment '%s' is created: %s", experiment.name, renamed)
        try:
            return str(client.create_experiment(experiment.name, location, tags=_tags(experiment)))
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            found = client.get_experiment_by_name(experiment.name)  # created by another process meanwhile
    if found.lifecycle_stage != "active":
        raise ExperimentDeleted(
            f"the experiment '{experiment.name}' (id {found.experiment_id}) was deleted in MLflow, so that it can "
            "neither be written to nor created again",
            way_out=f"restore it with 'mlflow experiments restore --experiment-id {found.experiment_id}', and with "
            f"MLFLOW_TRACKING_URI set to '{loggable(client.tracking_uri)}'",
        )
    missing = _tags(experiment).keys() - found.tags.keys()
    for name in sorted(missing):  # for an experiment that an older version created
        client.set_experiment_tag(found.experiment_id, name, _tags(experiment)[name])
    return str(found.experiment_id)


def renamed_experiments(client: mlflow.MlflowClient, experiment: Experiment) -> str:
    """Return a sentence about an experiment that had this name before a user renamed it, or an empty string."""
    views = {found.name: found.tags.get(f"{VIEW_TAG}{VIEW}", "") for found in client.search_experiments()}
    names = [name for name, view in views.items() if f'"{experiment.view}"' in view and name != experiment.name]
    if not names:
        return ""
    return (
        f"the runs of '{names[0]}', which had this name before it was renamed in MLflow, are not found; to use them, "
        f"give '{experiment.name}' another name and '{names[0]}' the name '{experiment.name}'"
    )


def run_page(experiment_id: str, run_id: str) -> str:
    """Return the path of a run's page in MLflow's UI."""
    return f"/#/experiments/{experiment_id}/runs/{run_id}?{WORKFLOW}"


def run_list(experiment_id: str) -> str:
    """Return the path of an experiment's run list in MLflow's UI, in the saved view."""
    return f"/#/experiments/{experiment_id}/runs?{WORKFLOW}&viewStateShareKey={VIEW}"


def _tags(experiment: Experiment) -> dict[str, str]:
    # Without the datasets, whose wide column would move the metrics off the screen.
    columns = ["attributes.`Models`", *(f"metrics.`{name}`" for name in experiment.metrics)]
    columns += [f"params.`{name}`" for name in experiment.params]
    now = int(time.time() * 1000)
    # The format in which MLflow's UI saves a view: a JSON object with the state of the page as a JSON string.
    view = {
        "name": experiment.view,
        "createdAt": now,
        "updatedAt": now,
        "state": json.dumps({"selectedColumns": columns}),
    }
    return {KIND_TAG: TRAINING_KIND, MLFLOW_RUN_NOTE: experiment.about, f"{VIEW_TAG}{VIEW}": json.dumps(view)}
