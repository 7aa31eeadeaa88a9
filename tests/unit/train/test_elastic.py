"""Training that continues with fewer ranks: the same batches, steps and results as without a loss."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pydantic import TypeAdapter
from torch import nn

from tasks.cache.loader import CacheLoader
from tasks.cache.manifest import open_cache
from tasks.cache.order import VirtualRanks
from tasks.collectives.reducer import broadcast_value, wait_for_all
from tasks.refs import TRAIN, VAL, CacheRef
from tasks.train import loop as loop_module
from tasks.train.buffers import VirtualBuffers
from tasks.train.checkpoint import Checkpoints, restore, restore_progress
from tasks.train.loop import LoopSettings, fit
from tasks.train.progress import EarlyStopping, Progress
from tasks.train.step import StepSettings
from tasks.train.step_callback import NullStepCallback
from tests.fakes.small_training import Killed
from tests.fakes.thread_ranks import ThreadRanks, ThreadReducer
from tests.fakes.tiny_training import CPU, NUM_CLASSES

EPOCHS = 2


class Pixels(nn.Module):
    """Every 16th pixel as float64, in the range 0 to 1."""

    def forward(self, images_BHWC: torch.Tensor) -> torch.Tensor:
        """Return (B, 48)."""
        return images_BHWC.flatten(1)[:, ::16].double() / 255


class KillAfter(NullStepCallback):
    """Write a checkpoint after a number of steps, and kill all ranks one step later."""

    def __init__(self, num_steps: int | None, save: Callable[[], None]) -> None:
        self._left = -1 if num_steps is None else num_steps
        self._save = save

    def after_step(self) -> bool:
        """Count a step."""
        self._left -= 1
        if self._left == 0:
            self._save()
        if self._left == -1:
            raise Killed
        return False


def train(
    cache: CacheRef,
    folder: Path,
    num_ranks: int,
    num_virtual: int,
    batch_size: int,
    accumulate_steps: int,
    *,
    kill_after: int | None = None,
) -> list[tuple[nn.Module, Progress]]:
    """Train on ranks in threads, from the newest checkpoint if there is one."""
    manifest = open_cache(cache)

    def rank_main(reducer: ThreadReducer) -> tuple[nn.Module, Progress]:
        ranks = VirtualRanks(reducer.rank, num_ranks, num_virtual)
        layers = nn.Linear(48, 6, dtype=torch.float64), nn.BatchNorm1d(6, dtype=torch.float64)
        model = nn.Sequential(Pixels(), *layers, nn.ReLU(), nn.Linear(6, NUM_CLASSES, dtype=torch.float64))
        values = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.rand(parameter.shape, generator=values, dtype=torch.float64) - 0.5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        progress = Progress(EarlyStopping(patience=EPOCHS, min_delta=0.0, higher_is_better=False))
        buffers = VirtualBuffers(model, ranks)
        checkpoints = Checkpoints(folder, keep=1, config={})
        name = checkpoints.newest()[0] if reducer.rank == 0 else None
        if name := broadcast_value(reducer, TypeAdapter(str | None), name):
            content = Checkpoints(folder, keep=1, config={}).load(name)
            restore_progress(content, progress, reducer.rank)
            restore(content, model, optimizer, buffers)

        def save() -> None:
            content = checkpoints.collect(model, optimizer, progress, reducer, buffers)
            if reducer.rank == 0:
                assert checkpoints.save(content, progress, "run")
            wait_for_all(reducer)  # Threads share their tensors: the next step waits for the file.

        def loader(split: str) -> CacheLoader:
            of_split = ranks if split == TRAIN else VirtualRanks.of(reducer.rank, num_ranks)
            return CacheLoader(
                cache.url,
                manifest,
                split,
                batch_size,
                seed=7 if split == TRAIN else None,
                ranks=of_split,
                workers_count=1,
            )

        loop = LoopSettings(
            lambda step: 0.1 / (1 + step),
            CPU,
            reducer,
            max_epochs=EPOCHS,
            monitor="val_loss",
            num_classes=NUM_CLASSES,
            step=StepSettings(seed=1, accumulate_steps=accumulate_steps),
            step_callback=KillAfter(kill_after, save),
            buffers=buffers,
        )
        fit(model, {TRAIN: loader(TRAIN), VAL: loader(VAL)}, optimizer, loop, progress, lambda *_epoch: None)
        return model, progress

    return ThreadRanks(num_ranks).run(rank_main)


@pytest.mark.parametrize(
    ("num_virtual", "num_left", "batch_size", "accumulate_steps", "rows"),
    [
        (2, 1, 3, 1, 23),
        (3, 2, 2, 2, 23),  # a rank with one virtual rank beside one with two
        (4, 3, 3, 1, 30),
        (5, 2, 1, 3, 31),
        (5, 3, 2, 1, 22),  # the last step has an image for some of the virtual ranks only
        (5, 1, 2, 1, 40),
        (3, 3, 2, 1, 23),
    ],
)
def test_run_resumed_on_fewer_and_again_on_more_ranks_equals_undisturbed_run(
    make_cache: Callable[..., CacheRef],
    tmp_path: Path,
    num_virtual: int,
    num_left: int,
    batch_size: int,
    accumulate_steps: int,
    rows: int,
) -> None:
    """Weights, batch norm's statistics, metrics and learning rates are the same, also in the middle of an epoch."""
    cache = make_cache({TRAIN: rows, VAL: 9}, rows_per_group=4)
    batches = num_virtual, batch_size, accumulate_steps
    expected, undisturbed = train(cache, tmp_path / "undisturbed", num_virtual, *batches)[0]
    steps_per_epoch = -(-rows // (num_virtual * batch_size * accumulate_steps))

    with pytest.raises(Killed):
        train(cache, tmp_path / "killed", num_virtual, *batches, kill_after=steps_per_epoch + 1)
    resumed = train(cache, tmp_path / "killed", num_left, *batches)
    assert len(resumed) == num_left

    # A host that was lost may be back when the run is started again.
    with pytest.raises(Killed):
        train(cache, tmp_path / "again", num_virtual, *batches, kill_after=0)
    with pytest.raises(Killed):
        train(cache, tmp_path / "again", num_left, *batches, kill_after=1)
    on_more = train(cache, tmp_path / "again", min(num_left + 1, num_virtual), *batches)
    assert len(on_more) == min(num_left + 1, num_virtual)

    for model, progress in (*resumed, *on_more):
        for name, value in model.state_dict().items():
            # The number of batches that a virtual rank has seen is its own; that of rank 0 is saved.
            if value.is_floating_point() or all(model is not other for other, _progress in on_more[1:]):
                assert torch.allclose(value, expected.state_dict()[name], rtol=1e-9, atol=1e-12), name
        assert len(progress.history) == EPOCHS
        for metrics, reference in zip(progress.history, undisturbed.history, strict=True):
            assert metrics.train_loss == pytest.approx(reference.train_loss, rel=1e-9)
            assert metrics.gradient_norm == pytest.approx(reference.gradient_norm, rel=1e-9)
            assert metrics.val_loss == pytest.approx(reference.val_loss, rel=1e-9)
            assert metrics.train_accuracy == reference.train_accuracy
            assert metrics.learning_rate == reference.learning_rate


def test_random_numbers_belong_to_virtual_ranks(
    make_cache: Callable[..., CacheRef], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dropout and augmentation of a batch draw from the same seed, whatever rank takes it."""
    cache = make_cache({TRAIN: 23, VAL: 9})
    seeds: dict[int, set[int]] = {}
    for num_ranks in (1, 2, 3):
        drawn = seeds[num_ranks] = set()
        monkeypatch.setattr(loop_module, "seed_step", lambda _device, seed, drawn=drawn: drawn.add(seed))
        train(cache, tmp_path / str(num_ranks), num_ranks, 3, 2, 1)

    assert seeds[1] == seeds[2] == seeds[3]
    assert len(seeds[1]) == EPOCHS * 3 * 4
