"""Scores of images that show none of a model's classes: AUROC on held-out classes, beside that of the maximum softmax.

Each draw holds out a quarter of the classes and trains on the others as the product does. Images of the split `test`
are compared with all images of the held-out classes. A distance or a subspace is fitted on the features of `train`, the
inputs of the head; the threshold of a false-alarm rate of 5 % on `val`.

Run: `make bench-unknown`; BENCH_ARGS=--quick for two draws. The photos need $LAKEVISION_TEST_DATA.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np
import torch
from sklearn.metrics import roc_auc_score

from tasks.config.storage import StorageConfig
from tasks.config.train import TrainConfig
from tasks.etl.source import write_digits
from tasks.model_package.classifier import ImageClassifier
from tasks.model_package.decode import decode_pixels
from tasks.model_package.serving import unknown_scores
from tasks.storage import resolve_storage
from tasks.tracking.runs import run_metrics
from tasks.tracking.trained import download_weights
from tasks.train.features import head_passes
from tasks.train.run import train_model
from tasks.train.spec import TrainingSpec
from tests.benchmarks.calibration import cache_of, splits_of
from tests.benchmarks.figures import Figure, write_figures

HELD_OUT = 0.25
"""Fraction of the classes that a draw holds out."""

GOAL_POINTS = 3.0
"""Points of AUROC above the maximum softmax that the score is to have."""

OURS, REFERENCE = "generalized entropy", "max softmax"
RATE = 0.05
NEIGHBOURS = 5
BATCH = 64


@dataclass
class Outputs:
    """Features (N, F), logits without temperature (N, K) and labels (N,) of images, float64 and int64."""

    features: torch.Tensor
    logits: torch.Tensor
    labels: torch.Tensor


Score = Callable[[Outputs], torch.Tensor]
"""A function that returns a score of each image, float64 (N,): higher for images of no class."""


def outputs_of(
    classifier: ImageClassifier, files: list[Path], classes: list[str], known: dict[Path, torch.Tensor]
) -> Outputs:
    """Return features and logits of images by the network in its serving form.

    Args:
        classifier: The classifier, whose head is the last layer.
        files: The images.
        classes: Its classes; images of others have the label -1.
        known: Features of the backbone by image, to which missing ones are added.
    """
    network = classifier._network
    missing = [file for file in files if file not in known]
    with head_passes(network) as passes:
        for begin in range(0, len(missing), BATCH):
            batch = missing[begin : begin + BATCH]
            images = [decode_pixels(file.read_bytes(), classifier.image_size) for file in batch]
            classifier.logits(torch.from_numpy(np.stack(images)))
            known |= dict(zip(batch, torch.cat([vectors for vectors, _logits in passes]).cpu(), strict=True))
            passes.clear()
    features = torch.stack([known[file] for file in files])
    with torch.inference_mode(), torch.autocast("cpu", network.precision, enabled=network.precision is not None):
        logits = network.head.cpu()(features)
    labels = [classes.index(file.parent.name) if file.parent.name in classes else -1 for file in files]
    return Outputs(features.double(), logits.double(), torch.tensor(labels))


def scores_of(train: Outputs, head: torch.nn.Module, temperature: float) -> dict[str, Score]:
    """Return the scores by name, fitted on the split `train`."""
    features, mean = train.features, train.features.mean(dim=0)
    num, width = features.shape
    classes = train.labels.unique()
    means = torch.stack([features[train.labels == label].mean(dim=0) for label in classes])
    within = features - means[torch.searchsorted(classes, train.labels)]
    identity = torch.eye(width, dtype=torch.float64)
    spread = within.T @ within / num
    # Shrunk to a multiple of the identity by the mean variance: there are about as many images as features.
    whiten = torch.linalg.cholesky(torch.linalg.inv(spread + spread.diagonal().mean() * identity))
    weight, bias = (value.detach().double() for value in (head.weight, head.bias))
    origin = -torch.linalg.pinv(weight) @ bias
    axes = torch.linalg.eigh((features - origin).T @ (features - origin))[1]
    residual = axes[:, : max(1, width - (512 if width > 768 else width // 2))]
    scale = train.logits.max(dim=1).values.mean() / ((features - origin) @ residual).norm(dim=1).mean()
    known = torch.nn.functional.normalize(features)

    def distance(of: Outputs, centres: torch.Tensor) -> torch.Tensor:
        return (torch.cdist(of.features @ whiten, centres @ whiten) ** 2).min(dim=1).values

    def entropy(logits: torch.Tensor) -> torch.Tensor:
        return -(torch.softmax(logits, dim=1) * torch.log_softmax(logits, dim=1)).sum(dim=1)

    def neighbour(of: Outputs) -> torch.Tensor:
        alike = torch.nn.functional.normalize(of.features) @ known.T
        return -alike.topk(NEIGHBOURS, dim=1).values[:, -1]

    return {
        REFERENCE: lambda of: -torch.softmax(of.logits / temperature, dim=1).max(dim=1).values,
        "max softmax, uncalibrated": lambda of: -torch.softmax(of.logits, dim=1).max(dim=1).values,
        "max logit": lambda of: -of.logits.max(dim=1).values,
        "max logit less the mean": lambda of: of.logits.mean(dim=1) - of.logits.max(dim=1).values,
        "energy": lambda of: -of.logits.logsumexp(dim=1),
        "entropy": lambda of: entropy(of.logits / temperature),
        "entropy at a temperature of 4": lambda of: entropy(of.logits / 4),
        OURS: lambda of: unknown_scores(of.logits),
        "generalized entropy, calibrated": lambda of: unknown_scores(of.logits / temperature),
        "Mahalanobis distance": lambda of: distance(of, means),
        "relative Mahalanobis distance": lambda of: distance(of, means) - distance(of, mean[None]),
        f"{NEIGHBOURS}th neighbour": neighbour,
        "ViM": lambda of: scale * ((of.features - origin) @ residual).norm(dim=1) - of.logits.logsumexp(dim=1),
    }


def draw_once(
    source: Path, side: int, settings: dict[str, Any], seed: int, known: dict[Path, torch.Tensor], folder: Path
) -> dict[str, list[float]]:
    """Train without the held-out classes; return AUROC, share of `test` and of held-out images above the threshold.

    All are in percent. The accuracy on `test` is under the name `accuracy`.
    """
    files = sorted(file for file in source.rglob("*") if file.is_file())
    every = sorted({file.parent.name for file in files})
    shuffled = np.random.default_rng(seed).permutation(every).tolist()
    held_out = set(shuffled[: round(HELD_OUT * len(every))])
    classes = [name for name in every if name not in held_out]
    parts = splits_of([file for file in files if file.parent.name not in held_out], seed)

    cache = cache_of(parts, classes, side, folder)
    storage = resolve_storage(StorageConfig(home=str(folder / "home")))
    run = train_model(TrainingSpec(train=TrainConfig(seed=seed, **settings), cache=cache, storage=storage))
    classifier = ImageClassifier.load(download_weights(storage, run, folder).parent)
    outputs = {split: outputs_of(classifier, part, classes, known) for split, part in parts.items()}
    unknown = outputs_of(classifier, [file for file in files if file.parent.name in held_out], classes, known)
    network = classifier._network
    found = {"accuracy": [100 * run_metrics(storage, run)["test_accuracy"]]}
    for name, score in scores_of(outputs["train"], network.head, network.temperature).items():
        test, others = score(outputs["test"]), score(unknown)
        threshold = score(outputs["val"]).quantile(1 - RATE)
        is_other = torch.cat([torch.zeros(len(test)), torch.ones(len(others))])
        shares = [float((part > threshold).double().mean()) for part in (test, others)]
        found[name] = [100 * value for value in (roc_auc_score(is_other, torch.cat([test, others])), *shares)]
    return found


def measure(name: str, source: Path, side: int, settings: dict[str, Any], num_draws: int) -> tuple[list[Figure], str]:
    """Return the mean AUROC of the product's score beside that of each other one, and a sentence about the draws."""
    rows: list[dict[str, list[float]]] = []
    known: dict[Path, torch.Tensor] = {}
    for seed in range(1, num_draws + 1):
        if "fine_tune" in settings or not settings.get("freeze_backbone", True):
            known = {}  # The backbone is another one.
        with TemporaryDirectory(prefix="lakevision-bench-") as folder:
            rows.append(draw_once(source, side, settings, seed, known, Path(folder)))
        print(
            f"{name}, draw {seed}: {', '.join(f'{key} {value[0]:.2f}' for key, value in rows[-1].items())}", flush=True
        )
    own = statistics.mean(row[OURS][0] for row in rows)
    figures = []
    for key in rows[0]:
        if key not in (OURS, "accuracy"):
            peer = statistics.mean(row[key][0] for row in rows)
            goal = round(1 + GOAL_POINTS / peer, 3) if key == REFERENCE else None
            holds = None if goal is None else own >= peer + GOAL_POINTS
            figures.append(Figure(f"AUROC, {name}", own, "%", key, peer, own / peer, goal, holds))
    print("\n| score | AUROC | gain, mean | least | false alarms | found |\n|---|---|---|---|---|---|")
    for key in sorted(rows[0].keys() - {"accuracy"}, key=lambda key: -statistics.mean(row[key][0] for row in rows)):
        area, alarms, hits = (statistics.mean(column) for column in zip(*(row[key] for row in rows), strict=True))
        gains = [row[key][0] - row[REFERENCE][0] for row in rows]
        mean = statistics.mean(gains)
        print(f"| {key} | {area:.2f} | {mean:+.2f} | {min(gains):+.2f} | {alarms:.1f} % | {hits:.1f} % |", flush=True)
    _own, alarms, hits = (statistics.mean(column) for column in zip(*(row[OURS] for row in rows), strict=True))
    accuracy = statistics.mean(row["accuracy"][0] for row in rows)
    return figures, (
        f"{name}: {num_draws} draws, test accuracy {accuracy:.1f} %; at a rate of {100 * RATE:.0f} %, {alarms:.1f} % "
        f"of `test` and {hits:.1f} % of the held-out classes are unknown"
    )


def main() -> None:
    """Measure on digits, and on photos with a frozen and with a fine-tuned network."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="two draws of each instead of six, with fine-tuning of two"
    )
    is_quick = parser.parse_args().quick
    figures, notes = [], []
    with TemporaryDirectory(prefix="lakevision-bench-") as folder:
        digits = Path(folder) / "digits"
        write_digits(digits)
        own = {"model": "resnet18", "weights": "none", "freeze_backbone": False, "max_epochs": 5, "batch_size": 32}
        given: list[tuple[str, Path, int, dict[str, Any], int]] = []
        data = os.environ.get("LAKEVISION_TEST_DATA")
        if data:
            photos = Path(data) / "photos"
            frozen = {"recipe": "head", "model": "mobilenet_v2", "weights": f"{data}/weights/mobilenet_v2.pth"}
            phase = {"unfreeze_from": "features.14", "learning_rate": 1e-4, "max_epochs": 2}
            given.append(("photos", photos, 224, frozen, 6))
            given.append(("photos, fine-tuned", photos, 224, frozen | {"recipe": "finetune", "fine_tune": [phase]}, 2))
        else:
            notes.append("photos: LAKEVISION_TEST_DATA is not set")
        given.append(("digits", digits, 32, own, 6))
        for name, source, side, settings, num_draws in given:
            rows, note = measure(name, source, side, settings, 2 if is_quick else num_draws)
            figures += rows
            notes.append(note)
    write_figures("unknown", figures, "; ".join(notes))


if __name__ == "__main__":
    main()
