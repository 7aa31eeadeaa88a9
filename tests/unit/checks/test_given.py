"""Checks of the paths and the network that a user named."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows.pipeline import pipeline
from tasks.checks.given import check_given
from tasks.config.pipeline import PipelineConfig
from tasks.config.prediction import PredictRun
from tasks.errors import WrongInput
from tasks.model.pretrained import classifier_names


def archive(folder: Path) -> Path:
    """Return an archive where a folder is expected."""
    file = folder / "photos.zip"
    file.write_bytes(b"PK")
    return file


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (lambda folder: {"source": str(folder / "no")}, "source is '.*no', which does not exist"),
        (lambda folder: {"source": str(archive(folder))}, "source is '.*photos.zip', which is an archive: unpack it"),
        (lambda _folder: {"model": "resnet19"}, "train.model is 'resnet19', .*: did you mean resnet18"),
        (lambda folder: {"weights": str(folder / "no.pth")}, "train.weights is '.*no.pth', which is not a file"),
    ],
)
def test_direct_call_is_refused_before_a_server_starts(
    settings: Callable[[Path], dict[str, Any]], sentence: str, tmp_path: Path
) -> None:
    """A temporary server takes seconds; its database is not created, and the traceback has no frame of Prefect."""
    storage = {"home": str(tmp_path / "home")}
    with pytest.raises(WrongInput, match=sentence) as refused:
        pipeline(PipelineConfig.model_validate(settings(tmp_path) | {"storage": storage}))
    assert not (tmp_path / "home" / "prefect").exists()
    assert not [entry for entry in refused.traceback if "site-packages" in str(entry.path)]


def test_missing_folder_to_predict_is_refused(tmp_path: Path) -> None:
    """A folder that exists, and a URL, are left to the stages."""
    with pytest.raises(WrongInput, match="predict.source is '.*', which does not exist"):
        check_given(PredictRun.model_validate({"source": str(tmp_path / "no")}))
    check_given(PredictRun.model_validate({"source": str(tmp_path)}))
    check_given(PipelineConfig.model_validate({"source": "s3a://bucket/photos"}))


def test_names_of_classifiers_are_those_of_torchvision() -> None:
    """The names are read from torchvision's sources, without its import."""
    import torchvision

    assert classifier_names() == set(torchvision.models.list_models(module=torchvision.models))
