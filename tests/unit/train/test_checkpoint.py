"""Checkpoints that are kept, removed, damaged or of another training run."""

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tasks.errors import WrongInput
from tasks.train.checkpoint import Checkpoints
from tasks.train.identity import check_fits
from tests.fakes.small_training import CONFIG, Killed, Training, assert_same, kill_at


def test_missing_folder_has_no_newest_checkpoint(tmp_path: Path) -> None:
    """A new training run has no checkpoint to resume from."""
    assert Checkpoints(tmp_path / "none", 2, CONFIG).newest() == (None, None)


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
    assert Checkpoints(tmp_path, 2, CONFIG).newest() == (names[-1], "run")
    assert Checkpoints(tmp_path, 2, CONFIG).load(names[-1])["best"] == best


def test_best_weights_are_kept_while_a_checkpoint_refers_to_them(tmp_path: Path) -> None:
    """They stay although there is a newer file of best weights, which no checkpoint refers to and which is removed."""
    with pytest.raises(Killed):
        Training(tmp_path).run(kill_at(3, 2))
    unreferenced = tmp_path / "best-00-000099.pt"
    unreferenced.write_bytes(b"of an epoch whose checkpoint was never written")

    with pytest.raises(Killed):
        Training(tmp_path).run(kill_at(3, 4))

    name, _run = Checkpoints(tmp_path, 2, CONFIG).newest()
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


@pytest.mark.parametrize("damage", [truncate, overwrite])
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


def test_checkpoint_without_its_best_weights_is_invalid(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A checkpoint is skipped with a warning if the file with the weights of its best epoch is missing."""
    with pytest.raises(Killed):
        Training(tmp_path).run(kill_at(3, 2))
    (best,) = tmp_path.glob("best-*.pt")
    best.unlink()

    assert Checkpoints(tmp_path, 2, CONFIG).newest() == (None, None)
    assert f"the weights of its best epoch, {best.name}, are missing" in caplog.text
    assert not list(tmp_path.glob("step-*.pt"))


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
    assert Checkpoints(tmp_path, 2, CONFIG).newest() == (newest.name, "run")
    assert not list(tmp_path.glob("*.unreadable"))


def test_checkpoint_of_another_code_version_is_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A checkpoint with other keys is skipped with a warning, and the one before it is used."""
    with pytest.raises(Killed):
        Training(tmp_path).run(kill_at(2, 3))
    older, newest = sorted(tmp_path.glob("step-*.pt"))
    content = torch.load(newest, weights_only=True)
    torch.save(content | {"form": [*content["form"], "more"]}, newest)

    assert Checkpoints(tmp_path, 2, CONFIG).newest() == (older.name, "run")
    assert "written by another version of this code" in caplog.text
    # The skipped checkpoint is renamed: a new run keeps its own checkpoints, whose numbers are lower.
    older.unlink()
    with pytest.raises(Killed):
        Training(tmp_path).run(kill_at(1, 1))
    name, _run = Checkpoints(tmp_path, 2, CONFIG).newest()
    assert name is not None
    assert name < newest.name


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
        match=r"\(cache is 'other' in the checkpoint and 'digest' now; "
        r"train.seed is 2 in the checkpoint and 1 now\): train with",
    ) as rejected:
        check_fits({"config": other, "classes": list(classes)}, CONFIG, classes, tmp_path)
    assert f"in '{tmp_path}'" in str(rejected.value)
    many = ["ant", "bee", *(f"class {number}" for number in range(7))]
    with pytest.raises(
        WrongInput,
        match=r"\(classes only in the checkpoint: class 0, class 1, class 2, class 3, class 4 and 2 more; "
        r"classes only in the data: cat\)",
    ):
        check_fits({"config": CONFIG, "classes": many}, CONFIG, classes, tmp_path)


def test_checkpoint_with_pickled_code_is_not_loaded(tmp_path: Path) -> None:
    """Loading a file executes no code, since only tensors and plain values are read."""

    class Payload:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (tmp_path / "executed",))

    torch.save({"run_id": Payload()}, tmp_path / "step-00-000001-000000000000+.pt")

    assert Checkpoints(tmp_path, 2, CONFIG).newest() == (None, None)
    assert not (tmp_path / "executed").exists()
