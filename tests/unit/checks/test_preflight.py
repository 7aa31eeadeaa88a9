"""Checks of model, device, and number of images before a cache is built."""

from contextlib import nullcontext
from pathlib import Path

import deltalake
import pyarrow as pa
import pytest
import torch
import torchvision

from tasks.checks.preflight import check_listing, check_split_size
from tasks.checks.trainable import check_training
from tasks.config.cache import CacheConfig
from tasks.config.distributed import DistributedConfig
from tasks.config.pipeline import PipelineConfig
from tasks.config.train import FineTunePhase, TrainConfig
from tasks.config.tune import Choices, TuneConfig, TuneRun
from tasks.errors import WrongInput
from tasks.etl.listing import class_sizes, list_images
from tasks.etl.source import Source
from tasks.model_package.serving import computes_bf16
from tasks.refs import TableRef
from tasks.storage import Storage
from tasks.tune.space import check_search, check_search_sizes

SMALL = CacheConfig(image_size=32)

SCRATCH = {"weights": "none", "freeze_backbone": False}


def listed(folder: Path, sizes: dict[str, int]) -> Source:
    """Return a source with so many files in each class folder, none of which is an image."""
    for label, number in sizes.items():
        for file in range(number):
            path = folder / label / f"{file}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    return Source(folder, list_images(folder), (None, None))


@pytest.mark.parametrize(
    ("sizes", "settings", "message"),
    [
        ({"a": 1, "b": 1}, {}, r"which has 2 images in 2 classes; training needs 4: .*: add 2 images$"),
        ({"a": 1, "b": 2}, {}, r"which has 3 images in 2 classes; training needs 4: .*: add 1 image$"),
        ({"a": 1, "b": 3}, {}, None),
        ({"a": 3, "b": 3}, {}, None),
        ({"a": 18, "b": 18}, {}, None),
        ({"a": 3, "b": 3}, {"etl": {"val_fraction": 0.0}}, r"^etl.val_fraction is 0, so that the split 'val' has no"),
        ({"a": 3, "b": 3}, {"etl": {"test_fraction": 0.0}}, r"^etl.test_fraction is 0, .*: give a larger fraction"),
        (
            {"a": 9, "b": 3},
            {"etl": {"split_group": {"by": "pattern", "pattern": "(./.)"}}},
            None,
        ),
        (
            {"a": 9, "b": 3},
            {"etl": {"split_group": {"by": "pattern", "pattern": "(^.)"}}},
            r"which has 2 groups in 2 classes; training needs 4: .*: add 2 groups$",
        ),
        ({"a": 9, "b": 3}, {"etl": {"min_images_per_class": 4}}, r"1 of 2 classes have fewer .* \('b' 3\)"),
        (
            {"a": 18, "b": 18},
            {"train": SCRATCH | {"accumulate_steps": 31}},
            r"^train.accumulate_steps is 31, but the source has at most 30 images for the split 'train'",
        ),
        (
            {"a": 3, "b": 3},
            {"train": SCRATCH | {"monitor": "val_top5_accuracy"}},
            r"^train.monitor is 'val_top5_accuracy', which is 1 in every epoch of 2 classes",
        ),
    ],
)
def test_what_numbers_of_files_say_is_checked_before_a_file_is_read(
    tmp_path: Path, storage: Storage, sizes: dict[str, int], settings: dict[str, object], message: str | None
) -> None:
    """The sentence has the number of images that are missing; a batch size above the number of images is accepted."""
    config = PipelineConfig.model_validate({"train": SCRATCH, **settings})
    source = listed(tmp_path, sizes)
    with nullcontext() if message is None else pytest.raises(WrongInput, match=message):
        check_listing(config, source, class_sizes(source.listing), storage, has_tables=False)


def test_phase_with_an_unknown_layer_is_refused(tmp_path: Path) -> None:
    """An unknown layer is refused before any work, and the message names the model's layers."""
    weights = tmp_path / "weights.pt"
    torch.save(torchvision.models.get_model("shufflenet_v2_x0_5", weights=None).state_dict(), weights)
    train = TrainConfig(
        model="shufflenet_v2_x0_5",
        weights=str(weights),
        fine_tune=[FineTunePhase(unfreeze_from="stage4"), FineTunePhase(unfreeze_from="layer4")],
    )
    with pytest.raises(WrongInput, match="unfreeze_from is 'layer4', which is not a layer"):
        check_training(train, SMALL)


@pytest.mark.skipif(computes_bf16(torch.device("cpu")), reason="this CPU has bfloat16")
def test_precision_without_hardware_support_is_refused() -> None:
    """bfloat16 is refused on a CPU without instructions for it, since emulation is many times slower."""
    train = TrainConfig(
        model="shufflenet_v2_x0_5", weights="none", freeze_backbone=False, precision="bf16", device="cpu"
    )
    with pytest.raises(WrongInput, match="train.precision is 'bf16' and cpu has no"):
        check_training(train, SMALL)


def test_ranks_that_cannot_use_the_wanted_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before ETL and cache, with cause and way out; with the device auto they train on the CPU, with a warning."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr("tasks.system.cores.has_nccl", lambda backend: backend == "torch")
    monkeypatch.setattr("tasks.checks.trainable.choose_precision", lambda *_: None)
    train = TrainConfig(model="shufflenet_v2_x0_5", weights="none", freeze_backbone=False, device="cuda")

    def check(settings: dict[str, object]) -> None:
        check_training(train, SMALL, distributed=DistributedConfig.model_validate(settings))

    with pytest.raises(WrongInput, match=r"is 'cuda', but Horovod was built without NCCL: .*backend to torch"):
        check({"backend": "horovod"})
    with pytest.raises(WrongInput, match=r"is 'cuda', but 3 ranks share .* 2 GPUs: give at most"):
        check({"backend": "torch", "num_ranks": 3})
    for accepted in ({"backend": "torch"}, {"num_ranks": 1}, {"backend": "horovod", "launcher": "spark"}):
        check(accepted)
    train = train.model_copy(update={"device": "auto"})
    check({"backend": "horovod"})


def test_compiling_without_a_compiler_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a CPU, the message names the missing compiler, and a compiler in $CXX is accepted."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    train = TrainConfig(model="shufflenet_v2_x0_5", weights="none", freeze_backbone=False, compile=True, device="cpu")
    with pytest.raises(WrongInput, match=r"train.compile is true, which needs .* and '(g|clang)\+\+' was not found"):
        check_training(train, SMALL)
    check_training(train.model_copy(update={"compile": False}), SMALL)
    assert train.model_copy(update={"freeze_backbone": True}).trains_head_only  # A head alone is never compiled.

    monkeypatch.setenv("CXX", "mine")
    with pytest.raises(WrongInput, match="and 'mine' was not found: install"):
        check_training(train, SMALL)
    compiler = tmp_path / "mine"
    compiler.touch(mode=0o755)
    check_training(train, SMALL)


def test_compiling_is_refused_if_the_head_is_not_the_last_layer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The head of squeezenet is followed by other layers, so the network is compiled despite a frozen backbone."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    for model, is_compiled in (("squeezenet1_1", True), ("shufflenet_v2_x0_5", False)):
        weights = tmp_path / f"{model}.pt"
        torch.save(torchvision.models.get_model(model, weights=None).state_dict(), weights)
        train = TrainConfig(recipe="head", model=model, weights=str(weights), compile=True, device="cpu")
        assert train.trains_head_only
        with pytest.raises(WrongInput, match="train.compile is true") if is_compiled else nullcontext():
            check_training(train, SMALL)


def test_every_precision_of_a_search_is_checked() -> None:
    """All precisions that a search may draw are checked, unless it runs on another machine."""
    train = TrainConfig(model="shufflenet_v2_x0_5", weights="none", freeze_backbone=False, device="cpu")
    search = TuneConfig(search={"precision": Choices(choices=["tf32", "fp32"])})
    config = TuneRun(train=train, tune=search, cache=SMALL)
    with pytest.raises(WrongInput, match="train.precision is 'tf32'|train.precision is tf32"):
        check_search(config)
    check_search(config, here=False)


@pytest.fixture
def images(tmp_path: Path) -> TableRef:
    """Return version 0 of a table, with 45 images to train on and 15 others; its version 1 has none to train on."""
    path = str(tmp_path / "images")
    for splits, mode in ((["train"] * 45 + ["val", "test", "val"] * 5, "error"), (["val", "test"] * 9, "overwrite")):
        rows = pa.table({"sha256": [str(row) for row in range(len(splits))], "split": splits})
        deltalake.write_deltalake(path, rows, mode=mode)
    return TableRef(path=path, version=0)


def test_more_parts_of_a_step_than_images_are_refused_before_the_cache_is_built(images: TableRef) -> None:
    """The table's version is checked; an empty split, and tables on a store, are checked when the cache is built."""
    train = TrainConfig(accumulate_steps=46)
    with pytest.raises(WrongInput, match="^train.accumulate_steps is 46, .*'train' has 45 images.* most 45$"):
        check_split_size(train, 1, images)
    with pytest.raises(WrongInput, match="^train.accumulate_steps is 46, .* most 22$"):
        check_split_size(train, 2, images)
    check_split_size(TrainConfig(batch_size=46), 45, images)
    check_split_size(train, 1, images.model_copy(update={"version": 1}))
    check_split_size(train, 1, TableRef(path="s3a://bucket/images", version=0))
    for file in Path(images.path).glob("*.parquet"):  # As VACUUM does with old versions, whose caches stay.
        file.unlink()
    check_split_size(train, 1, images)


def test_batch_that_a_trial_may_draw_is_refused_before_the_cache_is_built(images: TableRef) -> None:
    """A batch size of the search space that is larger than the split is refused."""
    tune = TuneConfig(search={"batch_size": {"low": 8, "high": 64}})
    with pytest.raises(WrongInput, match="^tune.search can draw {'batch_size': 64}"):
        check_search_sizes(TuneRun(tune=tune), images)
    check_search_sizes(TuneRun(tune=TuneConfig(search={"batch_size": {"low": 8, "high": 32}})), images)
    check_search_sizes(TuneRun(), images)  # The 64 of the default search is not set by the user.
