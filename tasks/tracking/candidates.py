"""The runs among which a promotion chooses."""

from tasks.refs import RunRef
from tasks.storage import Storage
from tasks.tracking.classifier_files import OLD_MODEL_TAG
from tasks.tracking.searches import TRIAL_TAG
from tasks.tracking.server import client_of, prepare_tracking

CHOSEN_TAG = "lakevision.chosen"
"""Tag of a trial whose settings were trained outside its search as well, as a search ends with those of its best."""


def promotable_runs(storage: Storage) -> list[RunRef]:
    """Return the newest finished run and every other finished run on the same cache, the newest first.

    Trials of a hyper-parameter search count only once their settings were chosen: the maximum over many trials is
    higher than their accuracy on new images.
    """
    found = client_of(storage).search_runs(
        [prepare_tracking(storage)],
        "attributes.status = 'FINISHED' AND metrics.test_accuracy >= 0",
        order_by=["attributes.start_time DESC"],
    )
    current = [run for run in found if OLD_MODEL_TAG not in run.data.tags]
    runs = [run for run in current if TRIAL_TAG not in run.data.tags or CHOSEN_TAG in run.data.tags]
    if not runs:
        return []
    digest = runs[0].data.params["cache.digest"]
    return [RunRef(run_id=run.info.run_id) for run in runs if run.data.params["cache.digest"] == digest]


def mark_chosen(storage: Storage, run: RunRef) -> None:
    """Tag a finished run that was trained as a trial, and is asked for outside its search."""
    client = client_of(storage)
    if TRIAL_TAG in client.get_run(run.run_id).data.tags:
        client.set_tag(run.run_id, CHOSEN_TAG, "true")
