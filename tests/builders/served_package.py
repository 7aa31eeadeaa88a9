"""Small model packages, and the file that names them to the workers of a service."""

from pathlib import Path

import torch

from tasks.model.training_network import build_classifier
from tasks.model_package.classifier import save_classifier
from tasks.refs import ModelRef
from tasks.serve.served import Served, ServedVersion

CLASSES = ("ant", "bee", "<b>cat</b>")
SIDE = 32


def write_package(folder: Path, seed: int, thresholds: tuple[float, ...] | None = None) -> Path:
    """Write a package with random weights."""
    torch.manual_seed(seed)
    network = build_classifier("squeezenet1_1", "none", len(CLASSES), freeze_backbone=False)
    save_classifier(folder, "squeezenet1_1", network.state_dict(), CLASSES, SIDE, unknown_thresholds=thresholds)
    return folder


def version(folder: Path, number: int, tables: str = "/tables") -> ServedVersion:
    """Return the package in a folder as this version of the model `photos`."""
    model = ModelRef(name="photos", version=number, run_id=f"run{number}")
    return ServedVersion(model=model, folder=str(folder), tables=tables)


def name_versions(file: Path, champion: ServedVersion | None, challenger: ServedVersion | None = None) -> None:
    """Name versions to the workers, as a supervisor does."""
    file.parent.mkdir(parents=True, exist_ok=True)
    Served(champion=champion, challenger=challenger, problem="" if champion else "no champion yet").write(file)
