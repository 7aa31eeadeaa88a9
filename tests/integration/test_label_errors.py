"""The flow `find-label-errors` on photos, some of whose labels are wrong."""

import os
import shutil
from pathlib import Path

import deltalake
import numpy as np
import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
from pydantic import ValidationError

from flows.etl import etl
from flows.find_label_errors import find_label_errors
from tasks.config.etl import EtlRun
from tasks.config.pipeline import LabelErrorsRun
from tasks.errors import WrongInput
from tasks.storage import Storage
from tests.builders.untrained_model import log_run

NUM_CLASSES, PER_CLASS, NUM_WRONG = 6, 25, 15


def write_photos(folder: Path, photos: Path) -> dict[str, str]:
    """Write photos in class folders, some of them in that of another class; return the true class of these by name."""
    classes = sorted((one for one in photos.iterdir() if one.is_dir()), key=lambda one: -len(list(one.iterdir())))
    names = [one.name for one in classes[:NUM_CLASSES]]
    chosen = [(name, file) for name in names for file in sorted((photos / name).iterdir())[:PER_CLASS]]
    wrong = set(np.random.default_rng(1).choice(len(chosen), NUM_WRONG, replace=False).tolist())
    moved = {}
    for number, (name, file) in enumerate(chosen):
        label = names[(names.index(name) + 1 + number % (NUM_CLASSES - 1)) % NUM_CLASSES] if number in wrong else name
        (folder / label).mkdir(parents=True, exist_ok=True)
        shutil.copy(file, folder / label / f"{name}-{file.name}")
        if number in wrong:
            moved[f"{label}/{name}-{file.name}"] = name
    return moved


@pytest.mark.skipif(not os.environ.get("LAKEVISION_TEST_DATA"), reason="LAKEVISION_TEST_DATA has no photos")
def test_wrong_labels_are_the_most_suspicious(prefect_harness: None, storage: Storage, tmp_path: Path) -> None:
    """In the report, with the right class, in the table, and on the page; another run has rows of its own."""
    data = Path(os.environ["LAKEVISION_TEST_DATA"])
    moved = write_photos(tmp_path / "photos", data / "photos")
    where = {"storage": {"home": storage.home}}
    etl(EtlRun.model_validate({"source": str(tmp_path / "photos"), **where}))
    network = {"model": "mobilenet_v2", "weights": str(data / "weights" / "mobilenet_v2.pth"), "image_size": 96}
    config = LabelErrorsRun.model_validate(network | where)
    report = find_label_errors(config)
    find_label_errors(config)
    rows = deltalake.DeltaTable(storage.table("suspects")).to_pyarrow_table().to_pylist()

    assert report.images == NUM_CLASSES * PER_CLASS
    assert NUM_WRONG / 2 < report.expected < 2 * NUM_WRONG
    shown = {image.path: image for image in report.shown[:NUM_WRONG]}
    assert len(moved.keys() & shown.keys()) >= 0.8 * NUM_WRONG
    assert sum(shown[path].suggested == name for path, name in moved.items() if path in shown) >= 0.75 * NUM_WRONG
    assert all(image.thumbnail.startswith("data:image/jpeg") for image in report.shown)
    found_at = sorted({row["found_at"] for row in rows})
    assert len(found_at) == 2
    first = sorted((row for row in rows if row["found_at"] == found_at[0]), key=lambda row: row["rank"])
    assert [row["rank"] for row in first] == list(range(1, report.suspected + 1))
    assert [row["sha256"] for row in first[: len(report.shown)]] == [image.sha256 for image in report.shown]
    with get_client(sync_client=True) as client:
        pages = client.read_artifacts(artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=["label-errors"])))
    assert "## Most suspicious" in str(pages[0].data)


def test_settings_without_features_are_refused() -> None:
    """With the setting, before anything is read."""
    with pytest.raises(ValidationError, match="label errors are found by cached features: train.weights is 'none'"):
        LabelErrorsRun.model_validate({"weights": "none"})
    with pytest.raises(ValidationError, match="has no cached features of a frozen backbone"):
        LabelErrorsRun.model_validate({"train": {"recipe": "scratch"}})


def test_networks_whose_head_is_a_convolution_are_refused(
    prefect_harness: None, storage: Storage, source: Path
) -> None:
    """And nothing is written."""
    where = {"storage": {"home": storage.home}}
    split = {"source": str(source), "val_fraction": 0.2, "test_fraction": 0.2}
    etl(EtlRun.model_validate({"etl": split, **where}))
    run = log_run(storage, Path(storage.home), seed=1, accuracy=0.6)
    with pytest.raises(WrongInput, match="the head of 'squeezenet1_1' is not its last layer"):
        find_label_errors(
            LabelErrorsRun.model_validate({"model": "squeezenet1_1", "weights": run.run_id, "image_size": 32, **where})
        )

    assert not Path(storage.table("suspects")).exists()
