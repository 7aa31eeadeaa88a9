"""Trainings killed at random moments, and on a disk that is full: they end like one that nothing happened to."""

import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torchvision

from tasks.config.distributed import DistributedConfig
from tasks.config.storage import StorageConfig
from tasks.errors import DiskFull, WrongInput
from tasks.launch.launcher import launch_ranks
from tasks.launch.spec import RankSpec
from tasks.refs import CacheRef
from tasks.storage import Storage, resolve_storage
from tasks.train.run import train_model
from tests.builders.disks import mounted_disk
from tests.builders.hand_made_cache import hand_made_cache
from tests.builders.killed_training import TRAIN, check_made_good, launch_and_kill
from tests.builders.processes import rank_processes
from tests.builders.training_runs import weights

MOMENTS = 3


@pytest.fixture
def cache(make_images, storage: Storage) -> CacheRef:
    """Return a cache of 60 images."""
    return hand_made_cache(make_images(), f"{storage.cache}/by-hand")


@pytest.mark.parametrize("num_ranks", [None, 2])
def test_a_training_killed_at_random_moments_ends_like_an_undisturbed_one(cache, storage, tmp_path, draw, num_ranks):
    """The same weights, one MLflow run with metrics, every epoch once, no checkpoint and no rank left."""
    distributed = None if num_ranks is None else DistributedConfig(num_ranks=num_ranks)
    other = resolve_storage(StorageConfig(home=str(tmp_path / "other")))
    began = time.monotonic()
    undisturbed = launch_ranks(RankSpec(train=TRAIN, distributed=distributed, cache=cache, storage=other))
    took = time.monotonic() - began
    spec = RankSpec(train=TRAIN, distributed=distributed, cache=cache, storage=storage)
    assert "was ended by signal 9" in launch_and_kill(spec, draw)
    for _ in range(1, MOMENTS):
        launch_and_kill(spec, draw, draw.uniform(0.3, 0.8) * took)
    check_made_good(launch_ranks(spec), storage, undisturbed, other, tmp_path)


def fill(filler: Path) -> None:
    """Write until the disk has no room left."""
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 16))


def test_a_full_disk_at_a_checkpoint_ends_no_training_and_spoils_no_checkpoint(cache, storage, tmp_path):
    """It is told; killed then, the training goes on from the one before; with room again it ends as if nothing was."""
    other = resolve_storage(StorageConfig(home=str(tmp_path / "other")))
    undisturbed = weights(train_model(TRAIN, cache, other), other, tmp_path)
    with mounted_disk(tmp_path / "small", storage, 60_000) as disk:
        small = resolve_storage(
            StorageConfig(
                home=str(disk.folder),
                cache=storage.cache,
                tables=storage.tables,
                artifacts=f"{tmp_path}/artifacts",
                tracking=f"sqlite:///{tmp_path}/mlflow.db",
            )
        )
        filler = disk.folder / "filler"

        class Killed(BaseException):
            """Stands for SIGKILL."""

        def fill_then_die(metrics):
            if metrics.epoch == 1:
                fill(filler)
            if metrics.epoch == 3:
                raise Killed

        with pytest.raises(Killed):
            train_model(TRAIN, cache, small, on_epoch=fill_then_die)
        filler.unlink()
        epochs = []
        run = train_model(TRAIN, cache, small, on_epoch=lambda metrics: epochs.append(metrics.epoch))
        assert epochs[0] in (1, 2)
        resumed = weights(run, small, tmp_path)
    assert all(torch.equal(resumed[name], undisturbed[name]) for name in undisturbed)


@pytest.mark.parametrize("num_ranks", [None, 2])
def test_a_disk_that_is_too_small_for_features_is_one_sentence_and_keeps_nothing_of_them(
    cache, storage, tmp_path, num_ranks
):
    """Refused where that is known before; full while they are made, it has no half cache, and no rank is left."""
    torch.manual_seed(1)
    network = tmp_path / "weights.pt"
    torch.save(torchvision.models.get_model(TRAIN.model, weights=None).state_dict(), network)
    head = TRAIN.model_copy(update={"weights": str(network), "freeze_backbone": True, "max_epochs": 1})
    distributed = None if num_ranks is None else DistributedConfig(num_ranks=num_ranks)
    with mounted_disk(tmp_path / "small", storage, 100) as disk:
        features = storage.model_copy(update={"cache": str(disk.folder)})
        spec = RankSpec(train=head, distributed=distributed, cache=cache, storage=features)
        with pytest.raises(WrongInput, match=r"needs 0.0 GB and .* set train.feature_cache to false, or set storage"):
            launch_ranks(spec)
        disk.remount("size=208k")
        with pytest.raises(DiskFull, match=rf"a disk was full .*'{disk.folder}' has [\d.]+ MB free") as full:
            launch_ranks(spec)
        assert "\n" not in str(full.value)
        assert [path for path in disk.folder.rglob("*") if path.suffix != ".lock"] == []
        assert rank_processes(storage.home) == []
        disk.remount("size=1000k")
        launch_ranks(spec)
        assert list(disk.folder.glob("*/manifest.json"))
