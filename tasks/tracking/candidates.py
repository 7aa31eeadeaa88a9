"""The runs among which a promotion chooses."""

from collections.abc import Iterator

from mlflow.entities import Run

from tasks.errors import WrongInput
from tasks.refs import TRIAL_TAG, RunRef, TableRef
from tasks.storage import Storage
from tasks.tracking.classifier_files import OLD_MODEL_TAG
from tasks.tracking.pages import all_results
from tasks.tracking.server import client_of, prepare_tracking

CHOSEN_TAG = "lakevision.chosen"
"""Tag of a trial whose settings were trained outside its search as well, as a search ends with those of its best."""


def promotable_runs(storage: Storage, table: TableRef | None = None) -> list[RunRef]:
    """Return the newest finished run and every other finished run on the same cache, the newest first.

    Trials of a hyper-parameter search count only once their settings were chosen: the maximum over many trials is
    higher than their accuracy on new images.

    Args:
        storage: Storage with the tracking URI.
        table: The table whose runs count; None if it cannot be read, as after it was deleted. Then the runs on a
            table at `storage.tables` count, or if there are none, all runs.

    Raises:
        WrongInput: There are finished runs, and none was trained on `table`.
    """
    client, experiments = client_of(storage), [prepare_tracking(storage)]
    found: Iterator[Run] = all_results(
        lambda token: client.search_runs(
            experiments,
            "attributes.status = 'FINISHED' AND metrics.test_accuracy >= 0",
            order_by=["attributes.start_time DESC"],
            page_token=token,
        )
    )
    current = [run for run in found if OLD_MODEL_TAG not in run.data.tags]
    runs = [run for run in current if TRIAL_TAG not in run.data.tags or CHOSEN_TAG in run.data.tags]
    if not runs:
        return []
    path = storage.table("images") if table is None else table.path
    own = [run for run in runs if _was_trained_on(run, path, "" if table is None else table.table_id)]
    if table is not None and not own:
        raise WrongInput(
            f"run_ids is empty, and none of the {len(runs)} finished runs was trained on the table '{path}': give "
            "run_ids, or the storage.tables of the runs"
        )
    runs = own or runs
    digest = runs[0].data.params["cache.digest"]
    return [RunRef(run_id=run.info.run_id) for run in runs if run.data.params["cache.digest"] == digest]


def _was_trained_on(run: Run, path: str, table_id: str) -> bool:
    """Return whether the run recorded this table, by its id in a home that was moved, or by the path of a new table."""
    params = run.data.params
    return bool(params.get("data.table") == path or (table_id and params.get("data.table_id") == table_id))


def mark_chosen(storage: Storage, run: RunRef) -> None:
    """Tag a finished run that was trained as a trial, and is asked for outside its search."""
    client = client_of(storage)
    if TRIAL_TAG in client.get_run(run.run_id).data.tags:
        client.set_tag(run.run_id, CHOSEN_TAG, "true")
