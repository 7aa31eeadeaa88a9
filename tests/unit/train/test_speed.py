"""What makes a training fast is switched on: memory format, threads, number format, compilation, batch size."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from tasks.collectives import SingleProcess
from tasks.config.storage import StorageConfig
from tasks.config.train import TrainConfig
from tasks.model.precision import SAMPLE, forward_bytes
from tasks.refs import CacheRef
from tasks.storage import resolve_storage
from tasks.system.cores import num_cores
from tasks.train.phases import TrainingContext, phases_of, prepare_phase
from tasks.train.spec import TrainingSpec
from tasks.train.training import Training
from tests.builders.phases import begun, context_of, prepare
from tests.builders.small_network import SMALL

# petastorm leaves its Parquet files to the reference count to close.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")


class TwoRanks(SingleProcess):
    """The first of two ranks, whose weights are those of the other anyway."""

    num_ranks = 2


@pytest.fixture
def cache(make_cache: Callable[..., CacheRef]) -> CacheRef:
    """A cache of noise of 32x32 pixels."""
    return make_cache({"train": 45, "val": 3, "test": 3}, image_size=32)


@pytest.fixture
def begin(cache: CacheRef, tmp_path: Path) -> Iterator[Callable[..., TrainingContext]]:
    """Yield what does what a training does before its first phase; afterwards there are as many threads as before."""
    before = torch.get_num_threads()

    def make(reducer: SingleProcess | None = None, **settings: object) -> TrainingContext:
        train = TrainConfig.model_validate(
            {"model": SMALL, "weights": "none", "freeze_backbone": False, "device": "cpu", "batch_size": 6} | settings
        )
        storage = resolve_storage(StorageConfig(home=str(tmp_path / "home")))
        return Training(TrainingSpec(train=train, cache=cache, storage=storage), reducer or SingleProcess())._prepare()

    yield make
    torch.set_num_threads(before)


def test_a_lone_process_has_its_weights_in_the_memory_format_of_the_images(
    begin: Callable[..., TrainingContext],
) -> None:
    """Channels last; ranks have them as Horovod takes them."""
    alone, ranked = (begin(reducer).classifier.network for reducer in (SingleProcess(), TwoRanks()))

    kernels = [module.weight for module in alone.modules() if isinstance(module, nn.Conv2d)]
    assert all(kernel.is_contiguous(memory_format=torch.channels_last) for kernel in kernels)
    # Of a kernel of one pixel, or of one channel, the two formats are the same.
    assert not all(kernel.is_contiguous() for kernel in kernels)
    assert all(value.is_contiguous() for value in ranked.parameters())


def test_as_many_threads_compute_as_are_asked_for(
    begin: Callable[..., TrainingContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the settings, or else by who launched the process, or else each rank its share of the cores."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    begin(num_threads=3)
    assert torch.get_num_threads() == 3

    begin()
    assert torch.get_num_threads() == 2

    monkeypatch.delenv("OMP_NUM_THREADS")
    for reducer in (SingleProcess(), TwoRanks()):
        share = max(1, num_cores() // reducer.num_ranks)
        torch.set_num_threads(share + 1)
        begin(reducer)
        assert torch.get_num_threads() == share


def test_the_network_computes_in_the_chosen_format(cache: CacheRef, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the device has it."""
    monkeypatch.setattr("tasks.model.precision.computes_bf16", lambda device: True)
    for precision, sums in (("bf16", torch.bfloat16), ("fp32", None)):
        context = context_of(cache, precision=precision, feature_cache=False)
        prepare(context)
        assert context.classifier.precision == sums


@pytest.mark.parametrize("wanted", [True, False])
def test_the_network_is_compiled_where_that_is_asked_for(cache: CacheRef, *, wanted: bool) -> None:
    """What is compiled is what runs in each step, so that its weights keep their names."""
    context = context_of(cache, compile=wanted, feature_cache=False)
    made = prepare(context)

    assert made.model is context.classifier
    assert (context.classifier.network._compiled_call_impl is not None) == wanted
    assert not any("_orig_mod" in name for name in context.classifier.state_dict())


def test_the_largest_batch_is_that_of_what_runs_in_each_step(cache: CacheRef, monkeypatch: pytest.MonkeyPatch) -> None:
    """Features take next to no memory; a frozen backbone that runs in each epoch takes it for its largest layers."""
    monkeypatch.setattr("tasks.model.precision.MIN_AUTO_STEPS", 1)
    image = torch.zeros(32, 32, 3, dtype=torch.uint8)

    # Half of it is for the forward pass: that is for ten images.
    free = 2 * 10 * forward_bytes(context_of(cache).classifier, image, SAMPLE) / SAMPLE
    monkeypatch.setattr("tasks.model.precision.free_memory", lambda: free)
    sizes = {}
    for feature_cache in (True, False):
        context, progress = context_of(cache, batch_size="auto", feature_cache=feature_cache), begun()
        prepare_phase(context, phases_of(context.spec.train)[0], progress)
        sizes[feature_cache] = progress.batch_size

    # Of 45 images, the largest power of two that is a step.
    assert sizes == {True: 32, False: 8}
