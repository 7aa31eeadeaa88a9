"""Checkpoints: which stay, which are damaged or of another training, and what is never read."""

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


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    """A training that begins has nothing to go on from."""
    assert Checkpoints(tmp_path / "none", 2, CONFIG).newest() == (None, None)


def test_the_last_few_checkpoints_and_the_best_weights_stay(tmp_path: Path) -> None:
    """Older ones are removed, and no partial file is left."""
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


def test_best_weights_stay_while_a_checkpoint_needs_them(tmp_path: Path) -> None:
    """Also beside newer ones: of an epoch that a killed process had as best, and this one has not."""
    with pytest.raises(Killed):
        Training(tmp_path).run(kill_at(3, 2))
    later = tmp_path / "best-00-000099.pt"
    later.write_bytes(b"of an epoch whose checkpoint was never written")

    with pytest.raises(Killed):
        Training(tmp_path).run(kill_at(3, 4))

    name, _run = Checkpoints(tmp_path, 2, CONFIG).newest()
    assert name is not None
    assert Checkpoints(tmp_path, 2, CONFIG).load(name)["best_state"]
    assert not later.exists()


def cut(content: bytes) -> bytes:
    """Return the first bytes."""
    return content[:1000]


def spoil(content: bytes) -> bytes:
    """Return the file with other bytes in the middle of its values' names."""
    place = content.index(b"optimizer")
    return content[:place] + b"\xff" * 9 + content[place + 9 :]


@pytest.mark.parametrize("damage", [cut, spoil])
def test_a_damaged_checkpoint_gives_way_to_the_one_before_it(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    """It is told, and the training goes on from the older one to the same end."""
    unbroken = Training(tmp_path / "unbroken")
    unbroken.run()
    with pytest.raises(Killed):
        Training(tmp_path / "killed").run(kill_at(2, 3))
    newest = max((tmp_path / "killed").glob("step-*.pt"))
    newest.write_bytes(damage(newest.read_bytes()))

    resumed = Training(tmp_path / "killed")
    resumed.run()

    assert_same(resumed, unbroken)


def test_a_checkpoint_whose_best_weights_are_gone_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The two are one: without those weights nothing could be handed over at the end."""
    with pytest.raises(Killed):
        Training(tmp_path).run(kill_at(3, 2))
    (best,) = tmp_path.glob("best-*.pt")
    best.unlink()

    assert Checkpoints(tmp_path, 2, CONFIG).newest() == (None, None)
    assert f"the weights of its best epoch, {best.name}, are gone" in caplog.text
    assert not list(tmp_path.glob("step-*.pt"))


@pytest.mark.parametrize("kind", ["step", "best"])
@pytest.mark.parametrize("fault", [errno.ELOOP, errno.EIO])
def test_a_checkpoint_that_the_disk_does_not_give_stays_for_another_time(tmp_path: Path, kind: str, fault: int) -> None:
    """A passing fault is no damage: it is raised, whether the file could not be opened or not be read."""
    with pytest.raises(Killed):
        Training(tmp_path).run(kill_at(3, 2))
    newest = max(tmp_path.glob("step-*.pt"))
    held = max(tmp_path.glob(f"{kind}-*.pt"))
    content = held.read_bytes()
    held.unlink()
    # The first page of a process's memory is none that can be read.
    held.symlink_to(held if fault == errno.ELOOP else "/proc/self/mem")

    with pytest.raises(OSError, match=re.escape(os.strerror(fault))) as raised:
        Checkpoints(tmp_path, 2, CONFIG).newest()
    assert raised.value.errno == fault

    held.unlink()
    held.write_bytes(content)
    assert Checkpoints(tmp_path, 2, CONFIG).newest() == (newest.name, "run")
    assert not list(tmp_path.glob("*.unreadable"))


def test_a_checkpoint_of_another_version_of_the_code_is_not_gone_on_from(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It holds other things by other names: told, and the one before it is taken."""
    with pytest.raises(Killed):
        Training(tmp_path).run(kill_at(2, 3))
    older, newest = sorted(tmp_path.glob("step-*.pt"))
    content = torch.load(newest, weights_only=True)
    torch.save(content | {"form": [*content["form"], "more"]}, newest)

    assert Checkpoints(tmp_path, 2, CONFIG).newest() == (older.name, "run")
    assert "written by another version of this code" in caplog.text
    # It is out of the way of those that come: a training begun anew keeps its own, whose numbers are lower.
    older.unlink()
    with pytest.raises(Killed):
        Training(tmp_path).run(kill_at(1, 1))
    name, _run = Checkpoints(tmp_path, 2, CONFIG).newest()
    assert name is not None
    assert name < newest.name


def test_half_written_checkpoint_is_never_read(tmp_path: Path) -> None:
    """What a process killed within the write leaves behind is removed by the next checkpoint."""
    with pytest.raises(Killed):
        Training(tmp_path).run(kill_at(1, 1))
    (tmp_path / "step-00-000009-000000000000.partial").write_bytes(b"half")

    resumed = Training(tmp_path)
    resumed.run()

    assert not list(tmp_path.glob("*.partial"))


def test_a_checkpoint_of_another_training_is_refused_by_name_of_the_difference(tmp_path: Path) -> None:
    """Classes by their names, the first five of them; settings, data and ranks with both values."""
    classes = ("ant", "bee", "cat")
    check_fits({"config": CONFIG, "classes": list(classes)}, CONFIG, classes, tmp_path)

    other = {"train": {"seed": 2, "model": "resnet18"}, "cache": "other"}
    with pytest.raises(
        WrongInput, match=r"\(cache is 'other' there and 'digest' here; train.seed is 2 there and 1 here\): train with"
    ) as refused:
        check_fits({"config": other, "classes": list(classes)}, CONFIG, classes, tmp_path)
    assert f"in '{tmp_path}'" in str(refused.value)
    many = ["ant", "bee", *(f"class {number}" for number in range(7))]
    with pytest.raises(
        WrongInput,
        match=r"\(classes only there: class 0, class 1, class 2, class 3, class 4 and 2 more; classes only here: cat\)",
    ):
        check_fits({"config": CONFIG, "classes": many}, CONFIG, classes, tmp_path)


def test_checkpoint_with_code_in_it_is_not_loaded(tmp_path: Path) -> None:
    """A file from outside runs nothing: only tensors and plain values are read."""

    class Payload:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (tmp_path / "executed",))

    torch.save({"run_id": Payload()}, tmp_path / "step-00-000001-000000000000+.pt")

    assert Checkpoints(tmp_path, 2, CONFIG).newest() == (None, None)
    assert not (tmp_path / "executed").exists()
