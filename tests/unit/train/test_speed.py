"""Performance settings of a run: memory format, threads, number format, compilation, batch size."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from tasks.collectives.reducer import Reducer
from tasks.config.recipe import phases_of
from tasks.config.storage import StorageConfig
from tasks.config.train import TrainConfig
from tasks.model.precision import SAMPLE, forward_bytes
from tasks.refs import CacheRef
from tasks.storage import resolve_storage
from tasks.system.cores import num_cores
from tasks.train.context import TrainingContext
from tasks.train.phases import prepare_phase
from tasks.train.spec import TrainingSpec
from tasks.train.training import Training
from tests.builders.phases import context_of, prepare, start_progress
from tests.builders.small_network import SMALL


class TwoRanks(Reducer):
    """Reducer of the first of two ranks, which broadcasts nothing."""

    num_ranks = 2


@pytest.fixture
def cache(make_cache: Callable[..., CacheRef]) -> CacheRef:
    """Return a cache of noise of 32x32 pixels."""
    return make_cache({"train": 45, "val": 3, "test": 3}, image_size=32)


@pytest.fixture
def prepare_training(cache: CacheRef, tmp_path: Path) -> Iterator[Callable[..., TrainingContext]]:
    """Return a function that prepares a run up to its first phase; afterwards the number of threads is restored."""
    before = torch.get_num_threads()

    def prepare_context(reducer: Reducer | None = None, **settings: object) -> TrainingContext:
        train = TrainConfig.model_validate(
            {"model": SMALL, "weights": "none", "freeze_backbone": False, "device": "cpu", "batch_size": 6} | settings
        )
        storage = resolve_storage(StorageConfig(home=str(tmp_path / "home")))
        return Training(TrainingSpec(train=train, cache=cache, storage=storage), reducer or Reducer())._prepare()

    yield prepare_context
    torch.set_num_threads(before)


def test_weights_are_in_channels_last(prepare_training: Callable[..., TrainingContext]) -> None:
    """Those of a single process and of ranks: dropout draws in the order of the memory, the same on any number."""
    for network in (prepare_training(reducer).classifier.network for reducer in (Reducer(), TwoRanks())):
        kernels = [module.weight for module in network.modules() if isinstance(module, nn.Conv2d)]
        assert all(kernel.is_contiguous(memory_format=torch.channels_last) for kernel in kernels)
        # For kernels of one pixel or one channel, both formats are the same.
        assert not all(kernel.is_contiguous() for kernel in kernels)


def test_number_of_threads_comes_from_settings_environment_or_cores(
    prepare_training: Callable[..., TrainingContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The setting has precedence over OMP_NUM_THREADS, and without both each rank has its share of the cores."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    prepare_training(num_threads=3)
    assert torch.get_num_threads() == 3

    prepare_training()
    assert torch.get_num_threads() == 2

    monkeypatch.delenv("OMP_NUM_THREADS")
    for reducer in (Reducer(), TwoRanks()):
        share = max(1, num_cores() // reducer.num_ranks)
        torch.set_num_threads(share + 1)
        prepare_training(reducer)
        assert torch.get_num_threads() == share


def test_network_computes_in_the_chosen_precision(cache: CacheRef, monkeypatch: pytest.MonkeyPatch) -> None:
    """The classifier has the precision of the settings, if the device supports it."""
    monkeypatch.setattr("tasks.model.precision.computes_bf16", lambda device: True)
    for precision, dtype in (("bf16", torch.bfloat16), ("fp32", None)):
        context = context_of(cache, precision=precision, feature_cache=False)
        prepare(context)
        assert context.classifier.precision == dtype


@pytest.mark.parametrize("enabled", [True, False])
def test_network_is_compiled_if_requested(cache: CacheRef, *, enabled: bool) -> None:
    """The network is compiled in place, so that its weights keep their names."""
    context = context_of(cache, compile=enabled, feature_cache=False)
    made = prepare(context)

    assert made.model is context.classifier
    assert (context.classifier.network._compiled_call_impl is not None) == enabled
    assert not any("_orig_mod" in name for name in context.classifier.state_dict())


def test_network_of_many_phases_is_compiled_in_each(cache: CacheRef, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of compiled graphs is enough for training and evaluation in all phases."""
    monkeypatch.setattr("torch._dynamo.config.recompile_limit", 8)
    phases = [{"unfreeze_from": "all", "learning_rate": 0.01, "max_epochs": 1}] * 4
    prepare(context_of(cache, compile=True, feature_cache=False, fine_tune=phases))
    assert torch._dynamo.config.recompile_limit == 5 * 4


def test_automatic_batch_size_depends_on_the_model_of_the_step(
    cache: CacheRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head on features allows larger batches than a frozen backbone, which needs memory for its layers."""
    monkeypatch.setattr("tasks.model.precision.MIN_AUTO_STEPS", 1)
    image = torch.zeros(32, 32, 3, dtype=torch.uint8)

    # Half of the free memory is for the forward pass, here of ten images.
    free = 2 * 10 * forward_bytes(context_of(cache).classifier, image, SAMPLE) / SAMPLE
    monkeypatch.setattr("tasks.model.precision.free_memory", lambda: free)
    sizes = {}
    for feature_cache in (True, False):
        context, progress = context_of(cache, batch_size="auto", feature_cache=feature_cache), start_progress()
        prepare_phase(context, phases_of(context.spec.train)[0], progress)
        sizes[feature_cache] = progress.batch_size

    # For features, the largest power of two up to 45 images.
    assert sizes == {True: 32, False: 8}
