"""Promotions and rollbacks in a subprocess that a test may kill: killed_promotions.py STAGE STORAGE RUN_ID.

It prints `ready`, waits for a line, works, and prints `done`.
"""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa

from tasks.config.promotion import PromoteConfig, RollbackConfig
from tasks.refs import ModelRef, RunRef
from tasks.registry import aliases
from tasks.registry.aliases import CHALLENGER, CHAMPION, PREVIOUS
from tasks.registry.history import DECISION_TAG
from tasks.registry.promote import promote_best
from tasks.registry.rollback import roll_back
from tasks.storage import Storage
from tasks.tables.snapshots import latest
from tasks.tracking import models
from tests.builders.delta_rows import delta_rows
from tests.builders.processes import ROOT, plain_environment
from tests.builders.trials import predict_here
from tests.builders.untrained_model import log_run
from tests.conftest import write_images

NAME = "photos"
LIVENESS_SECONDS = 240

ANY_FIGURES = PromoteConfig(model_name=NAME, min_accuracy_gain=-1.0, max_recall_drop=1.0)
NO_FIGURES = PromoteConfig(model_name=NAME, min_accuracy_gain=1.0)
DEFAULTS = PromoteConfig(model_name=NAME)
REPLACING = PromoteConfig(model_name=NAME, replace_unusable=True)
UNUSABLE = {"lakevision.sha256.weights.safetensors": "0"}
"""Tag of a champion whose file of weights differs from the registered one."""

STAGES: dict[str, Callable[[Storage, RunRef], object]] = {
    "promote": lambda storage, run: promote_best([run], ANY_FIGURES, storage),
    "keep": lambda storage, run: promote_best([run], NO_FIGURES, storage),
    "stay": lambda storage, run: promote_best([run], DEFAULTS, storage),
    "replace": lambda storage, run: promote_best([run], REPLACING, storage),
    "rollback": lambda storage, _run: roll_back(RollbackConfig(model_name=NAME, version=2, reason="worse"), storage),
}


@dataclass(frozen=True)
class Prepared:
    """Storage before each stage, and the run to promote.

    Attributes:
        storages: By stage; tests work on copies.
        run: The second run, which is the champion before a rollback.
    """

    storages: dict[str, Storage]
    run: RunRef


def prepare(storage: Storage, folder: Path) -> Prepared:
    """Log two runs on a table of 12 test images, and promote the first.

    In another copy the second is promoted as well, and in a third the champion is unusable.
    """
    write_images(folder / "source", per_class=8)
    files = sorted((folder / "source").glob("*/*.png"))
    rows = {
        "sha256": [str(number) for number in range(len(files))],
        "label": [file.parent.name for file in files],
        "content": [file.read_bytes() for file in files],
        "split": ["test", "train"] * (len(files) // 2),
    }
    deltalake.write_deltalake(storage.table("images"), pa.table(rows))
    first, second = (log_run(storage, folder, seed, 0.5, latest(None, storage.table("images"))) for seed in (1, 2))
    promote_best([first], ANY_FIGURES, storage)
    promoted = copied(storage, folder / "promoted")
    STAGES["promote"](promoted, second)
    unusable = copied(storage, folder / "unusable")
    models.tag_version(unusable, ModelRef(name=NAME, version=1, run_id=first.run_id), UNUSABLE)
    storages = dict.fromkeys(("promote", "keep"), storage) | dict.fromkeys(("stay", "replace"), unusable)
    return Prepared(storages | {"rollback": promoted}, second)


def copied(storage: Storage, folder: Path) -> Storage:
    """Copy registry and tables; the files of the models are the same as hard links, since no stage changes them."""
    folder.mkdir()
    shutil.copy(storage.tracking.removeprefix("sqlite:///"), folder / "mlflow.db")
    shutil.copytree(storage.tables, folder / "tables")
    shutil.copytree(storage.artifacts, folder / "artifacts", copy_function=os.link)
    return storage.model_copy(
        update={
            "home": str(folder),
            "tables": str(folder / "tables"),
            "artifacts": str(folder / "artifacts"),
            "tracking": f"sqlite:///{folder}/mlflow.db",
        }
    )


def try_here() -> None:
    """Let promotions of this process try models in it: a fresh one takes seconds, in which nothing changes."""
    aliases.predict_once = predict_here


def run_and_kill(stage: str, storage: Storage, run: RunRef, seconds: float | None) -> float | None:
    """Run a stage in a subprocess, and kill it with SIGKILL `seconds` after it began to work.

    Returns:
        The duration of the work in seconds, or None if it was killed.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.builders.killed_promotions", stage, storage.model_dump_json(), run.run_id],
        cwd=ROOT,
        env=plain_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    began = time.monotonic()
    process.stdin.write("go\n")
    process.stdin.flush()
    killer = threading.Timer(LIVENESS_SECONDS if seconds is None else seconds, process.kill)
    killer.start()
    # Up to the line that ends the work: the end of the process takes up to as long again.
    is_done = "done\n" in iter(process.stdout.readline, "")
    took = time.monotonic() - began
    process.communicate(timeout=LIVENESS_SECONDS)
    killer.cancel()
    print(f"{stage}: {'done' if is_done else 'killed'} after {took:.2f} s")
    return took if is_done else None


def state_of(storage: Storage) -> dict[str, Any]:
    """Return aliases, tags, decisions and predictions, without times, random ids, and what a later run may change.

    The home is `~` in them: a copied home finds its tables relative to itself.

    The tags of the registered model have the challengers that the test images have judged.
    """
    versions: dict[str, Any] = {}
    number = 1
    while (version := models.numbered_version(storage, NAME, str(number))) is not None:
        tags = models.version_tags(storage, version)
        tags.pop(models.PROMOTION_TAG, None)  # The sentence of the last run, which may find the work done.
        if DECISION_TAG in tags:
            tags[DECISION_TAG] = str(_without_moment(json.loads(tags[DECISION_TAG])))
        versions[str(number)] = (version.run_id, {tag: value.replace(storage.home, "~") for tag, value in tags.items()})
        number += 1
    rows = deltalake.DeltaTable(storage.table("promotions")).to_pyarrow_table().sort_by("decided_at").to_pylist()
    predictions = delta_rows(deltalake.DeltaTable(storage.table("predictions"))).to_pylist()
    aliases = {name: models.model_with_alias(storage, NAME, name) for name in (CHAMPION, CHALLENGER, PREVIOUS)}
    return {
        "aliases": {name: None if found is None else found.version for name, found in aliases.items()},
        "versions": versions,
        "model": models.model_tags(storage, NAME),
        "decisions": [_without_moment(row) for row in rows],
        "predictions": sorted((row["sha256"], row["model_version"], row["label"]) for row in predictions),
    }


def _without_moment(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in {"decision_id", "decided_at"}}


if __name__ == "__main__":
    wanted, given, run_id = sys.argv[1:]
    import tasks.predict.held_out  # noqa: F401  # torch: seconds, in which nothing changes

    try_here()
    print("ready", flush=True)
    sys.stdin.readline()
    sys.stdout, printed_before = sys.stderr, sys.stdout
    STAGES[wanted](Storage.model_validate_json(given), RunRef(run_id=run_id))
    print("done", file=printed_before, flush=True)
