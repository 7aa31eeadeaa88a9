"""What cannot be trained is refused before a cache is built for it."""

from pathlib import Path

import pytest
import torch
import torchvision

from tasks.config import CacheConfig, FineTuneStage, TrainConfig
from tasks.errors import WrongInput
from tasks.preflight.check import check_training
from tasks.train.precision import computes_bf16

SMALL = CacheConfig(image_size=32)


def test_a_stage_that_names_no_layer_is_refused(tmp_path: Path) -> None:
    """Before any work, with the layers there are."""
    weights = tmp_path / "weights.pt"
    torch.save(torchvision.models.get_model("shufflenet_v2_x0_5", weights=None).state_dict(), weights)
    train = TrainConfig(
        model="shufflenet_v2_x0_5",
        weights=str(weights),
        fine_tune=[FineTuneStage(unfreeze_from="stage4"), FineTuneStage(unfreeze_from="layer4")],
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
