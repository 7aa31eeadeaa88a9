"""What cannot be trained is refused before a cache is built for it."""

from contextlib import nullcontext
from pathlib import Path

import deltalake
import pyarrow as pa
import pytest
import torch
import torchvision

from tasks.config.cache import CacheConfig
from tasks.config.train import FineTunePhase, TrainConfig
from tasks.config.tune import Choices, TuneConfig, TuneRun
from tasks.errors import WrongInput
from tasks.model.precision import computes_bf16
from tasks.preflight.check import check_split_size
from tasks.preflight.trainable import check_training
from tasks.refs import TableRef
from tasks.tune.check import check_search, check_search_sizes

SMALL = CacheConfig(image_size=32)


def test_a_stage_that_names_no_layer_is_refused(tmp_path: Path) -> None:
    """Before any work, with the layers there are."""
    weights = tmp_path / "weights.pt"
    torch.save(torchvision.models.get_model("shufflenet_v2_x0_5", weights=None).state_dict(), weights)
    train = TrainConfig(
        model="shufflenet_v2_x0_5",
        weights=str(weights),
        fine_tune=[FineTunePhase(unfreeze_from="stage4"), FineTunePhase(unfreeze_from="layer4")],
    )
    with pytest.raises(WrongInput, match="unfreeze_from is 'layer4', which is no layer of the model: give all, or one"):
        check_training(train, SMALL)


@pytest.mark.skipif(computes_bf16(torch.device("cpu")), reason="this CPU has bfloat16")
def test_a_precision_that_the_device_has_not_is_refused() -> None:
    """Emulated it would be many times slower."""
    train = TrainConfig(
        model="shufflenet_v2_x0_5", weights="none", freeze_backbone=False, precision="bf16", device="cpu"
    )
    with pytest.raises(WrongInput, match="train.precision is 'bf16' and cpu has no instructions"):
        check_training(train, SMALL)


def test_compiling_without_a_compiler_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a CPU, with the one that is looked for; one that $CXX names will do."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    train = TrainConfig(model="shufflenet_v2_x0_5", weights="none", freeze_backbone=False, compile=True, device="cpu")
    with pytest.raises(WrongInput, match=r"train.compile is true, which needs .* and '(g|clang)\+\+' is not there"):
        check_training(train, SMALL)
    check_training(train.model_copy(update={"compile": False}), SMALL)
    assert train.model_copy(update={"freeze_backbone": True}).is_head_alone  # Which is never compiled.

    monkeypatch.setenv("CXX", "mine")
    with pytest.raises(WrongInput, match="and 'mine' is not there: install"):
        check_training(train, SMALL)
    compiler = tmp_path / "mine"
    compiler.touch(mode=0o755)
    check_training(train, SMALL)


def test_compiling_is_refused_where_the_head_takes_no_features(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The head of squeezenet is followed by more layers: its network is compiled, whatever is asked of features."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    for model, is_compiled in (("squeezenet1_1", True), ("shufflenet_v2_x0_5", False)):
        weights = tmp_path / f"{model}.pt"
        torch.save(torchvision.models.get_model(model, weights=None).state_dict(), weights)
        train = TrainConfig(model=model, weights=str(weights), compile=True, device="cpu")
        assert train.is_head_alone
        with pytest.raises(WrongInput, match="train.compile is true") if is_compiled else nullcontext():
            check_training(train, SMALL)


def test_every_number_format_that_a_search_may_draw_is_looked_at() -> None:
    """Not that of the last of its extremes alone; nothing is said of a machine that this one is not."""
    train = TrainConfig(model="shufflenet_v2_x0_5", weights="none", freeze_backbone=False, device="cpu")
    search = TuneConfig(search={"precision": Choices(choices=["tf32", "fp32"])})
    config = TuneRun(train=train, tune=search, cache=SMALL)
    with pytest.raises(WrongInput, match="train.precision is 'tf32'|train.precision is tf32"):
        check_search(config)
    check_search(config, here=False)


@pytest.fixture
def images(tmp_path: Path) -> TableRef:
    """A table of 45 images to train on and 15 others; its version after that has none to train on."""
    path = str(tmp_path / "images")
    for splits, mode in ((["train"] * 45 + ["val", "test", "val"] * 5, "error"), (["val", "test"] * 9, "overwrite")):
        rows = pa.table({"sha256": [str(row) for row in range(len(splits))], "split": splits})
        deltalake.write_deltalake(path, rows, mode=mode)
    return TableRef(path=path, version=0)


def test_a_batch_larger_than_the_split_is_refused_before_there_is_a_cache(images: TableRef) -> None:
    """By the table's version; a store's is left to the cache, and so is an empty split."""
    train = TrainConfig(batch_size=46)
    with pytest.raises(WrongInput, match="^train.batch_size is 46, but the split 'train' has 45 images, .* most 45"):
        check_split_size(train, 1, images)
    with pytest.raises(WrongInput, match="^train.batch_size is 46 on each of 2 ranks, .* give at most 22"):
        check_split_size(train, 2, images)
    check_split_size(TrainConfig(batch_size=45), 1, images)
    check_split_size(TrainConfig(batch_size="auto"), 45, images)
    check_split_size(train, 1, images.model_copy(update={"version": 1}))
    check_split_size(train, 1, TableRef(path="s3a://bucket/images", version=0))
    for file in Path(images.path).glob("*.parquet"):  # As a clean-up does with old versions, of which caches stay.
        file.unlink()
    check_split_size(train, 1, images)


def test_a_batch_that_a_trial_may_draw_is_refused_before_there_is_a_cache(images: TableRef) -> None:
    """The search would end with the first trial that draws it."""
    tune = TuneConfig(search={"batch_size": {"low": 8, "high": 64}})
    with pytest.raises(
        WrongInput, match="^tune.search can draw {'batch_size': 64}; .*: train.batch_size is 64, but the split"
    ):
        check_search_sizes(TuneRun(tune=tune), images)
    check_search_sizes(TuneRun(tune=TuneConfig(search={"batch_size": {"low": 8, "high": 32}})), images)
    check_search_sizes(TuneRun(), images)  # Nobody asked for the 64 of the default search.
