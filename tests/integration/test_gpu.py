"""Training and batch inference on a GPU: NCCL, resumed runs, what fits into its memory, and predictions."""

import json
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import deltalake
import pytest
import torch

from tasks.cache.loader import CacheLoader
from tasks.cache.manifest import read_manifest
from tasks.collectives.reducer import Reducer
from tasks.config.distributed import DistributedConfig
from tasks.config.etl import EtlConfig
from tasks.config.promotion import PromoteConfig
from tasks.config.recipe import PhaseTrain, values_of
from tasks.config.storage import SparkConfig
from tasks.config.train import TrainConfig
from tasks.environment import rank_environment
from tasks.errors import WrongInput
from tasks.etl.ingest import ingest_images
from tasks.launch.launcher import launch_ranks
from tasks.launch.restarts import RankFailed
from tasks.model.device import make_optimizer
from tasks.model.precision import choose_precision, largest_batch
from tasks.model.training_network import build_classifier
from tasks.model_package.classifier import ImageClassifier
from tasks.refs import RunRef
from tasks.registry.promote import promote_best
from tasks.storage import Storage
from tasks.tracking.runs import read_artifact, run_metrics
from tasks.train.loop import train_one_epoch
from tasks.train.spec import TrainingSpec
from tasks.train.step import StepSettings
from tests.builders.processes import rank_processes
from tests.builders.rank_cases import BACKENDS, CASES, run_case, start_ranks
from tests.builders.training_runs import SMALL, train, weights
from tests.builders.untrained_model import log_run, predict
from tests.fakes.interrupted_training import coloured_cache
from tests.fakes.small_training import same_tensors
from tests.fakes.tiny_training import loop_of

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(600),
]

GIBIBYTE = 2**30


def config_of(storage: Storage, run: RunRef) -> dict[str, Any]:
    """Return the configuration that the run logged."""
    config: dict[str, Any] = json.loads(read_artifact(storage, run, "config.json"))
    return config


def test_one_rank_over_nccl_equals_one_process_in_every_bit(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients, statistics and checkpoints of both backends go through NCCL, which changes no bit of one rank's."""
    import horovod.torch as hvd  # Here: it takes seconds to load.

    if not hvd.nccl_built():
        pytest.skip("Horovod was built without NCCL")
    # cuBLAS reads it with its first kernel.
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", rank_environment()["CUBLAS_WORKSPACE_CONFIG"])
    names = sorted(CASES.keys() - {"diverged"})
    trained = start_ranks(1, tmp_path / "ranks", names, "cuda")
    for name in names:
        case = replace(CASES[name], interrupt_at=None)
        expected = run_case(case, Reducer(), 1, tmp_path / f"alone-{name}", "cuda")
        for backend in BACKENDS:
            (results,) = trained[backend]
            # Statistics of synchronized batch norms have another formula; and the kernel of the gradients' norm sums in
            # an order that depends on where they lie in memory.
            if case.step.sync_batch_norm or case.step.max_gradient_norm:
                torch.testing.assert_close(results[name]["state"], expected["state"], rtol=1e-12, atol=1e-15)
                continue
            assert results[name]["history"] == expected["history"], (name, backend)
            for key, value in expected["state"].items():
                assert value.is_cuda
                assert torch.equal(results[name]["state"][key], value), (name, backend, key)


@pytest.mark.parametrize(
    "settings", [{"precision": "auto"}, {"model": "squeezenet1_1", "compile": True, "precision": "auto"}, {}]
)
def test_killed_run_resumes_to_the_same_weights(storage, make_home, tmp_path, settings) -> None:
    """The run is described with its GPU; its checkpoint has the state of the optimizer on the GPU."""
    cache = coloured_cache(f"{storage.cache}/larger", rows={"train": 120, "val": 12, "test": 12})
    settings = {"model": "shufflenet_v2_x0_5", "max_epochs": 4, "patience": 4, "device": "cuda"} | settings
    other = make_home("other")
    undisturbed = weights(train(cache, other, **settings), other, tmp_path)

    def kill(event) -> None:
        if event["epoch"] == 2:
            (rank,) = rank_processes(storage.home)
            rank.kill()

    with pytest.raises(RankFailed, match=r"ended by signal 9"):
        train(cache, storage, on_event=kill, **settings)
    run = train(cache, storage, **settings)

    assert same_tensors(weights(run, storage, tmp_path), undisturbed)
    config = config_of(storage, run)
    assert config["device"] == "cuda:0"
    assert config["processor"] == torch.cuda.get_device_name()
    assert run_metrics(storage, run)["best_val_accuracy"] > 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_more_ranks_than_gpus_train_on_the_cpu_or_are_refused(storage, backend: str) -> None:
    """NCCL does not support two ranks on one GPU."""
    num_ranks = torch.cuda.device_count() + 1
    cache = coloured_cache(f"{storage.cache}/coloured")
    distributed = DistributedConfig(num_ranks=num_ranks, backend=backend)
    spec = TrainingSpec(train=SMALL, distributed=distributed, cache=cache, storage=storage)
    run = launch_ranks(spec)
    config = config_of(storage, run)
    assert config["device"] == "cpu"
    on_gpus = spec.model_copy(update={"train": SMALL.model_copy(update={"device": "cuda"})})
    with pytest.raises(WrongInput, match=r"train\.device is 'cuda', but .*(without NCCL|at most as many ranks)"):
        launch_ranks(on_gpus)


def test_automatic_batch_size_fits_into_the_free_memory() -> None:
    """A step of that size with its optimizer fits beside memory in use; eight times as many images do not."""
    device = torch.device("cuda")
    torch.cuda.empty_cache()
    config = TrainConfig(model="resnet50", weights="none", freeze_backbone=False)
    torch.manual_seed(1)
    model = build_classifier("resnet50", "none", 10, freeze_backbone=False).to(device)
    model.precision = choose_precision("auto", device)
    free, total = torch.cuda.mem_get_info()
    # The trial reserves a twentieth of the GPU's memory.
    taken = torch.empty(free - total // 20 - 6 * GIBIBYTE, dtype=torch.uint8, device=device)
    example = torch.zeros(224, 224, 3, dtype=torch.uint8)
    size = largest_batch(model, example, 10**6, 1, device)

    def step(num_images: int) -> None:
        optimizer = make_optimizer(values_of(config), model)
        images = torch.zeros(num_images, 224, 224, 3, dtype=torch.uint8, device=device)
        torch.nn.functional.cross_entropy(model(images), torch.zeros(num_images, device=device).long()).backward()
        optimizer.step()

    assert 8 <= size < 1024
    for _ in range(2):
        step(size)
    model.zero_grad()
    with pytest.raises(torch.OutOfMemoryError):
        step(8 * size)
    del taken


def test_batch_inference_equals_that_on_the_cpu(spark, source, storage, tmp_path) -> None:
    """The workers of Spark compute on the GPU, and probabilities are those of the CPU, up to rounding."""
    ingest_images(EtlConfig(source=str(source)), storage, SparkConfig())
    promote_best([log_run(storage, tmp_path, seed=1, accuracy=0.5)], PromoteConfig(), storage)

    report = predict(storage)

    assert (report.predicted, report.errors) == (60, 0)
    images, rows = (
        deltalake.DeltaTable(storage.table(name)).to_pyarrow_table().to_pylist() for name in ("images", "predictions")
    )
    contents = {image["sha256"]: image["content"] for image in images}
    on_cpu = ImageClassifier.load(tmp_path / "classifier-1", torch.device("cpu"))
    direct = on_cpu.predict([contents[row["sha256"]] for row in rows])
    assert [row["probability"] for row in rows] == pytest.approx([found.probability for found in direct], abs=0.01)
    assert sum(row["label"] == found.label for row, found in zip(rows, direct, strict=True)) >= 54

    def has_used_gpu(_number: int) -> bool:
        return "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized()

    slots = 4 * spark.sparkContext.defaultParallelism
    assert any(spark.sparkContext.range(slots, numSlices=slots).map(has_used_gpu).collect())


def count_waits(folder: Path, num_steps: int) -> int:
    """Return how often an epoch of so many steps waits for the GPU."""
    cache = coloured_cache(str(folder), rows={"train": 6 * num_steps, "val": 6, "test": 6})
    manifest = read_manifest(cache.url)
    assert manifest is not None
    model = build_classifier("squeezenet1_1", "none", 3, freeze_backbone=False).to("cuda")
    optimizer = make_optimizer(PhaseTrain(learning_rate=1e-4), model)
    loader = CacheLoader(cache.url, manifest, "train", 6, seed=1, pin_memory=True)
    step = StepSettings(max_gradient_norm=1.0, label_smoothing=0.1)
    loop = loop_of(lambda step: 1e-4, step=step, device=torch.device("cuda"))
    train_one_epoch(model, loader, optimizer, loop, 0)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            train_one_epoch(model, loader, optimizer, loop, 1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(one.message) for one in found)


def test_steps_are_prepared_ahead_of_the_gpu(tmp_path) -> None:
    """Only the check of losses and gradients, every 20 steps and after the last one, waits for the GPU."""
    few, many = count_waits(tmp_path / "few", 10), count_waits(tmp_path / "many", 50)
    # Two more checks, of a loss and a gradient each.
    assert 0 < many == few + 4
