"""The two experiments: training runs, and data validations apart from them; and how MLflow's UI opens each."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

import mlflow
from mlflow.exceptions import MlflowException
from mlflow.utils.mlflow_tags import MLFLOW_RUN_NOTE

KIND_TAG, TRAINING_KIND = "mlflow.experimentKind", "custom_model_development"
"""The kind of an experiment of trained models, where MLflow goes by a tag."""

WORKFLOW = "workflowType=machine_learning"
"""In a link: without it MLflow 3.17 opens a browser that it has not seen before on traces of language models, whatever
the experiment's kind."""

VIEW_TAG = "mlflow.sharedViewState."
"""Begins the tags that hold the saved views of a run list."""

VIEW = "lakevision"
"""Id of the saved view; MLflow's own list of runs shows no metric until a user chooses some."""


@dataclass(frozen=True)
class Experiment:
    """An experiment, and what its run list shows."""

    name: str
    about: str
    """Its description, in Markdown."""
    view: str
    """Name of its saved view."""
    metrics: Sequence[str]
    """Columns of that view."""


TRAINING = Experiment(
    name="lakevision",
    about="Training runs. The saved view **Results** shows their metrics; data validations are in the experiment "
    "`lakevision-data`.",
    view="Results",
    metrics=("best_val_accuracy", "test_accuracy", "test_macro_f1"),
)

DATA = Experiment(
    name="lakevision-data",
    about="Data validations: one run per version of the tables. The saved view **Checks** shows what they measured; "
    "training runs are in the experiment `lakevision`.",
    view="Checks",
    metrics=("images", "classes", "imbalance_ratio", "quarantined_fraction", "duplicates", "near_duplicates"),
)


def prepare_experiment(client: mlflow.MlflowClient, experiment: Experiment, location: str) -> str:
    """Create the experiment where it is missing, with its artifacts at `location`, and return its id.

    What a user changed in the UI (kind, description, view) stays.
    """
    found = client.get_experiment_by_name(experiment.name)
    if found is None:
        try:
            return str(client.create_experiment(experiment.name, location, tags=_tags(experiment)))
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            found = client.get_experiment_by_name(experiment.name)  # Another process was quicker.
    missing = _tags(experiment).keys() - found.tags.keys()
    for name in sorted(missing):  # Of an experiment that an older version made.
        client.set_experiment_tag(found.experiment_id, name, _tags(experiment)[name])
    return str(found.experiment_id)


def run_page(experiment_id: str, run_id: str) -> str:
    """Return where MLflow's UI shows a run."""
    return f"/#/experiments/{experiment_id}/runs/{run_id}?{WORKFLOW}"


def run_list(experiment_id: str) -> str:
    """Return where MLflow's UI shows an experiment's runs in the saved view."""
    return f"/#/experiments/{experiment_id}/runs?{WORKFLOW}&viewStateShareKey={VIEW}"


def _tags(experiment: Experiment) -> dict[str, str]:
    # Without the datasets, whose column is so wide that metrics would be off the screen.
    columns = ["attributes.`Models`", *(f"metrics.`{name}`" for name in experiment.metrics)]
    now = int(time.time() * 1000)
    # As MLflow's UI itself saves a view: an envelope around the state of the page, which is JSON within JSON.
    view = {
        "name": experiment.view,
        "createdAt": now,
        "updatedAt": now,
        "state": json.dumps({"selectedColumns": columns}),
    }
    return {
        KIND_TAG: TRAINING_KIND,
        MLFLOW_RUN_NOTE: experiment.about,
        f"{VIEW_TAG}{VIEW}": json.dumps(view),
    }
