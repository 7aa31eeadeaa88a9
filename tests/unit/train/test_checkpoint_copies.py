"""Copies of checkpoints on hosts without a shared folder."""

from pathlib import Path

import pytest

from tasks.config.distributed import DistributedConfig
from tasks.config.train import TrainConfig
from tasks.environment import local_rank_environment
from tasks.refs import CacheRef
from tasks.storage import Storage
from tasks.train.checkpoint import Checkpoints, send_newest_checkpoint, writes_checkpoints
from tasks.train.spec import TrainingSpec
from tests.fakes.small_training import CONFIG, Killed, Training, kill_at, newest_run
from tests.fakes.thread_ranks import ThreadRanks, ThreadReducer


def write_checkpoint(folder: Path, epoch: int) -> str:
    """Train into a folder until an epoch is half trained; return the name of the newest checkpoint."""
    with pytest.raises(Killed):
        Training(folder).run(kill_at(epoch, 2))
    name, _content = Checkpoints(folder, 2, CONFIG).newest()
    assert name is not None
    return name


def send(folders: list[Path]) -> None:
    """Send the newest checkpoint among hosts with two ranks each."""

    def rank_main(reducer: ThreadReducer) -> None:
        host, local_rank = divmod(reducer.rank, 2)
        send_newest_checkpoint(Checkpoints(folders[host], 2, CONFIG), reducer, writes=local_rank == 0)

    ThreadRanks(2 * len(folders)).run(rank_main)


@pytest.mark.parametrize("holder", [0, 1, 2])
def test_every_host_gets_the_newest_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holder: int) -> None:
    """Also where a host has an older one, in several broadcasts, and no partial file is left."""
    monkeypatch.setattr("tasks.train.checkpoint.CHUNK_BYTES", 1000)
    folders = [tmp_path / f"host-{number}" for number in range(3)]
    newest = write_checkpoint(folders[holder], 2)
    write_checkpoint(folders[(holder + 1) % 3], 1)

    send(folders)

    best = newest.partition("+")[2]
    for folder in folders:
        assert newest_run(folder) == (newest, "run")
        for name in (newest, best):
            assert (folder / name).read_bytes() == (folders[holder] / name).read_bytes()
        assert list(folder.glob("*.partial")) == []


def test_damaged_checkpoint_is_not_sent(tmp_path: Path) -> None:
    """A host whose newest checkpoint is damaged gets the valid one of the other."""
    folders = [tmp_path / "host-0", tmp_path / "host-1"]
    damaged, valid = write_checkpoint(folders[0], 2), write_checkpoint(folders[1], 1)
    for path in folders[0].glob("step-*.pt"):
        path.write_bytes(b"damaged")

    send(folders)

    assert damaged > valid
    # The damaged ones, with their higher numbers, would be kept in place of those to come.
    assert [path.name for path in folders[0].glob("step-*.pt")] == [valid]
    assert [Checkpoints(folder, 2, CONFIG).newest()[0] for folder in folders] == [valid, valid]


def test_hosts_without_checkpoints_send_nothing(tmp_path: Path) -> None:
    """No folder is created."""
    send([tmp_path / "host-0", tmp_path / "host-1"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("shared_home", "expected"), [(True, [True, False, False, False]), (False, [True, False, True, False])]
)
def test_one_rank_of_each_host_writes(
    storage: Storage, monkeypatch: pytest.MonkeyPatch, shared_home: bool, expected: list[bool]
) -> None:
    """Only rank 0 where the folder is shared."""
    spec = TrainingSpec(
        train=TrainConfig(weights="none", freeze_backbone=False),
        distributed=DistributedConfig(num_ranks=4, launcher="hosts", hosts="a:2,b:2", shared_home=shared_home),
        cache=CacheRef(url="/nowhere", digest="none"),
        storage=storage,
    )
    found = []
    for rank in range(4):
        for name, value in local_rank_environment(rank % 2, 2).items():
            monkeypatch.setenv(name, value)
        found.append(writes_checkpoints(spec, rank))
    assert found == expected
