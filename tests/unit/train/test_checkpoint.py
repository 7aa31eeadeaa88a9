"""Checkpoints that are kept, removed, damaged or of another training run."""

import errno
import os
import re
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.errors import WrongInput
from tasks.metrics.evaluate import EpochMetrics
from tasks.train import checkpoint
from tasks.train.checkpoint import Checkpoints, restore_progress
from tasks.train.continuation import check_fits
from tasks.train.progress import EarlyStopping, Progress
from tests.fakes.small_training import CONFIG, Killed, Training, assert_same, kill_at, newest_run


def test_missing_folder_has_no_newest_checkpoint(tmp_path: Path) -> None:
    """A new training run has no checkpoint to resume from."""
    assert Checkpoints(tmp_path / "none", 2, CONFIG).newest() == (None, {})


def test_newest_checkpoints_and_their_best_weights_are_kept(tmp_path: Path) -> None:
    """Older checkpoints are removed, and no partial file is left."""
    with pytest.raises(Killed):
        Training(tmp_path).run(kill_at(3, 2))

    names = sorted(path.name for path in tmp_path.iterdir())

    (best,) = (name for name in names if name.startswith("best"))
    assert [name for name in names if name.startswith("step")] == [
        f"step-00-000003-000000000014+{best}",
        f"step-00-000003-000000000021+{best}",
    ]
    assert len(names) == 3
    assert newest_run(tmp_path) == (names[-1], "run")
    assert Checkpoints(tmp_path, 2, CONFIG).load(names[-1])["best"] == best


def test_best_weights_are_kept_while_a_checkpoint_refers_to_them(tmp_path: Path) -> None:
    """They stay although there is a newer file of best weights, which no checkpoint refers to and which is removed."""
    with pytest.raises(Killed):
        Training(tmp_path).run(kill_at(3, 2))
    unreferenced = tmp_path / "best-00-000099.pt"
    unreferenced.write_bytes(b"of an epoch whose checkpoint was never written")

    with pytest.raises(Killed):
        Training(tmp_path).run(kill_at(3, 4))

    name, _content = Checkpoints(tmp_path, 2, CONFIG).newest()
    assert name is not None
    assert Checkpoints(tmp_path, 2, CONFIG).load(name)["best_state"]
    assert not unreferenced.exists()


def truncate(content: bytes) -> bytes:
    """Return the first 1,000 bytes."""
    return content[:1000]


def overwrite(content: bytes) -> bytes:
    """Return the content with the key `optimizer` overwritten."""
    place = content.index(b"optimizer")
    return content[:place] + b"\xff" * 9 + content[place + 9 :]


def replace(_content: bytes) -> bytes:
    """Return bytes in which torch's unpickler fails with an IndexError."""
    return b"torn"


@pytest.mark.parametrize("damage", [truncate, overwrite, replace])
def test_damaged_checkpoint_falls_back_to_the_one_before(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    """Training resumes from the older checkpoint, with the same result as an uninterrupted run."""
    uninterrupted = Training(tmp_path / "uninterrupted")
    uninterrupted.run()
    with pytest.raises(Killed):
        Training(tmp_path / "killed").run(kill_at(2, 3))
    newest = max((tmp_path / "killed").glob("step-*.pt"))
    newest.write_bytes(damage(newest.read_bytes()))

    resumed = Training(tmp_path / "killed")
    resumed.run()

    assert_same(resumed, uninterrupted)


def test_checkpoint_without_its_best_weights_is_invalid(tmp_path: Path) -> None:
    """A run without another checkpoint is refused with the reason, and the file stays as it is."""
    with pytest.raises(Killed):
        Training(tmp_path).run(kill_at(3, 2))
    (best,) = tmp_path.glob("best-*.pt")
    best.unlink()
    names = {path.name for path in tmp_path.iterdir()}

    for _start in range(2):
        with pytest.raises(WrongInput, match="can be read .*or remove the files") as refused:
            Checkpoints(tmp_path, 2, CONFIG).newest()
        assert f"the weights of its best epoch, {best.name}, are missing" in str(refused.value)
        assert {path.name for path in tmp_path.iterdir()} == names


@pytest.mark.parametrize("kind", ["step", "best"])
@pytest.mark.parametrize("fault", [errno.ELOOP, errno.EIO])
def test_unreadable_checkpoint_is_kept_and_the_fault_raised(tmp_path: Path, kind: str, fault: int) -> None:
    """An OSError on opening or reading is raised, and the checkpoint is valid again once the fault is gone."""
    with pytest.raises(Killed):
        Training(tmp_path).run(kill_at(3, 2))
    newest = max(tmp_path.glob("step-*.pt"))
    held = max(tmp_path.glob(f"{kind}-*.pt"))
    content = held.read_bytes()
    held.unlink()
    # The first page of a process's memory cannot be read.
    held.symlink_to(held if fault == errno.ELOOP else "/proc/self/mem")

    with pytest.raises(OSError, match=re.escape(os.strerror(fault))) as raised:
        Checkpoints(tmp_path, 2, CONFIG).newest()
    assert raised.value.errno == fault

    held.unlink()
    held.write_bytes(content)
    assert newest_run(tmp_path) == (newest.name, "run")
    assert not list(tmp_path.glob("*.unreadable"))


def test_damaged_checkpoint_is_renamed_once_an_older_one_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its number is higher than those that the resumed run writes, which would be taken for older ones."""
    with pytest.raises(Killed):
        Training(tmp_path).run(kill_at(2, 3))
    older, newest = sorted(tmp_path.glob("step-*.pt"))
    newest.write_bytes(truncate(newest.read_bytes()))

    assert newest_run(tmp_path) == (older.name, "run")
    assert f"cannot resume from {newest} (" in "\n".join(caplog.messages)
    assert newest.with_suffix(".unreadable").exists()


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the content of a checkpoint."""
    content = torch.load(path, weights_only=True)
    change(content)
    torch.save(content, path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda content: content.update(version=2), "has version 2"),
        (lambda content: content.update(later=1), "has the value later, which is unknown"),
        (lambda content: content["history"][0].update(later=1.0), "has the value history.later, which is unknown"),
        (lambda content: content["running"].update(later=1.0), "has the value running.later, which is unknown"),
    ],
)
def test_checkpoint_of_a_newer_release_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], reason: str
) -> None:
    """An older release neither drops what it does not know nor starts again: the file stays as it is."""
    with pytest.raises(Killed):
        Training(tmp_path).run(kill_at(2, 3))
    names = {path.name for path in tmp_path.iterdir()}
    newest = max(tmp_path.glob("step-*.pt"))
    rewrite(newest, change)

    with pytest.raises(WrongInput, match=re.escape(f"'{newest}' {reason}: ")):
        Checkpoints(tmp_path, 2, CONFIG).newest()
    assert {path.name for path in tmp_path.iterdir()} == names


@dataclass(frozen=True)
class LaterMetrics(EpochMetrics):
    """Metrics of a later release."""

    later: float = 0.5


def test_values_that_a_checkpoint_lacks_have_the_value_that_means_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later release resumes from a checkpoint of this one, also from those that have no version."""
    uninterrupted = Training(tmp_path / "uninterrupted")
    uninterrupted.run()
    with pytest.raises(Killed):
        Training(tmp_path / "killed").run(kill_at(2, 3))
    for path in (tmp_path / "killed").glob("step-*.pt"):
        rewrite(path, lambda content: content.pop("version"))
    monkeypatch.setattr(checkpoint, "CONTENT", (*checkpoint.CONTENT, "later"))
    monkeypatch.setitem(checkpoint.ADDED, "later", 7)
    monkeypatch.setitem(checkpoint.PARTS, "history", LaterMetrics)
    monkeypatch.setattr(checkpoint, "EpochMetrics", LaterMetrics)

    checkpoints = Checkpoints(tmp_path / "killed", 2, CONFIG)
    name, _content = checkpoints.newest()
    assert name is not None
    content = checkpoints.load(name)
    assert content["later"] == 7
    progress = Progress(EarlyStopping(3, 0.0, higher_is_better=True))
    restore_progress(content, progress)
    assert [metrics.later for metrics in progress.history if isinstance(metrics, LaterMetrics)] == [0.5, 0.5]

    monkeypatch.undo()
    resumed = Training(tmp_path / "killed")
    resumed.run()
    assert_same(resumed, uninterrupted)


def test_values_added_to_checkpoints_have_a_value_that_means_as_before() -> None:
    """Without one, training runs of older releases could not resume: add it to the dataclass, or to ADDED."""
    version_1 = {
        *("config", "classes", "model", "optimizer", "rank_buffers", "phase", "first_epoch", "next_epoch", "running"),
        *("batch_size", "average", "stopping", "history", "seconds", "provenance", "tags"),
    }
    assert set(checkpoint.CONTENT) - version_1 == checkpoint.ADDED.keys()
    required = {
        key: {field.name for field in fields(kind) if MISSING is field.default is field.default_factory}
        for key, kind in checkpoint.PARTS.items()
    }
    assert required == {
        "running": set(),
        "stopping": {"patience", "min_delta", "higher_is_better"},
        "history": {
            *("epoch", "train_loss", "train_accuracy", "val_loss", "val_accuracy", "val_top5_accuracy"),
            *("val_macro_f1", "learning_rate", "gradient_norm", "images_per_second", "data_wait_share"),
            *("train_seconds", "validation_seconds"),
        },
    }


def test_partial_checkpoint_is_ignored_and_removed(tmp_path: Path) -> None:
    """The partial file of a process killed during a write is removed by the next checkpoint."""
    with pytest.raises(Killed):
        Training(tmp_path).run(kill_at(1, 1))
    (tmp_path / "step-00-000009-000000000000.partial").write_bytes(b"half")

    resumed = Training(tmp_path)
    resumed.run()

    assert not list(tmp_path.glob("*.partial"))


def test_checkpoint_of_another_run_is_rejected_with_the_differences(tmp_path: Path) -> None:
    """The error lists the first five differing classes, and both values of differing settings and data."""
    classes = ("ant", "bee", "cat")
    check_fits({"config": CONFIG, "classes": list(classes)}, CONFIG, classes, tmp_path)

    other = {"train": {"seed": 2, "model": "resnet18"}, "cache": "other"}
    with pytest.raises(
        WrongInput,
        match=r"cache is 'other' in .* 'digest' now; train.seed is 2",
    ) as rejected:
        check_fits({"config": other, "classes": list(classes)}, CONFIG, classes, tmp_path)
    assert f"in '{tmp_path}'" in str(rejected.value)
    many = ["ant", "bee", *(f"class {number}" for number in range(7))]
    with pytest.raises(
        WrongInput,
        match=r": class 0, .* class 4 and 2 more; .* data: cat\)",
    ):
        check_fits({"config": CONFIG, "classes": many}, CONFIG, classes, tmp_path)


def test_checkpoint_with_pickled_code_is_not_loaded(tmp_path: Path) -> None:
    """Loading a file executes no code, since only tensors and plain values are read."""

    class Payload:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (tmp_path / "executed",))

    torch.save({"run_id": Payload()}, tmp_path / "step-00-000001-000000000000+.pt")

    with pytest.raises(WrongInput, match="no checkpoint in .* can be read"):
        Checkpoints(tmp_path, 2, CONFIG).newest()
    assert not (tmp_path / "executed").exists()
