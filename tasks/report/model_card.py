"""The model card in Markdown: results, weakest classes, limits, data, training and reproduction.

Its sections follow Mitchell et al., "Model Cards for Model Reporting" (2019), arXiv:1810.03993. All statements are
derived from the training run.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from operator import attrgetter

import torch
from pydantic import BaseModel

from tasks.cache.manifest import CacheManifest
from tasks.commands import flow_command
from tasks.config.cache import CacheConfig
from tasks.config.distributed import DistributedConfig
from tasks.config.recipe import HEAD_NAME, FineTuningPlan, lower_is_better, monitored
from tasks.config.train import TrainConfig
from tasks.errors import join_names
from tasks.interval import wilson_interval
from tasks.metrics.calibration import NUM_BINS, Scores
from tasks.metrics.evaluate import DetailedEvaluation, EpochMetrics, PrecisionDifference
from tasks.model_package.description import RATES, Precision
from tasks.refs import TRAIN, CacheRef
from tasks.storage import Storage
from tasks.text.markup import markdown_code, markdown_fence, markdown_table, markdown_text

NUM_WEAKEST = 5
NUM_CONFUSIONS = 5
NUM_LISTED_CLASSES = 30

FEW_IMAGES = 10
"""With fewer test images than this, a single image changes a class's recall by more than 10 percentage points."""

WIDE_INTERVAL = 0.2
"""Width of the 95 % interval of the accuracy above which the card begins with it; an accuracy of 0.9 on 30 images."""


@dataclass(frozen=True)
class TrainingFacts:
    """Settings, provenance and results of a finished training run."""

    train: TrainConfig
    distributed: DistributedConfig | None
    cache: CacheRef
    manifest: CacheManifest
    weights_digest: str
    num_ranks: int
    device: str
    history: Sequence[EpochMetrics]
    best_epoch: int
    max_epochs: int
    """Maximum number of epochs over all phases."""
    phases: Sequence[tuple[int, str]]
    """First epoch and name of each phase."""
    test: DetailedEvaluation
    """Metrics of the serving form on the split `test`."""
    precision: Precision
    """Precision in which the model is served."""
    temperature: float
    """Divisor of the logits, fitted on the split `val`."""
    scores: Scores
    """Images of the split `val` by their score of `unknown`."""
    difference: PrecisionDifference | None = None
    """Difference between predictions in the serving precision and in float32; None if that is the precision."""
    folds: tuple[float, float, float] | None = None
    """Mean accuracy of the head in a cross-validation, and its 95 % interval; None without one."""
    plan: FineTuningPlan | None = None
    """Plan of the fine-tuning by the recipe, if there is one."""
    backend_reason: str = ""
    """Reason for the backend of the ranks."""
    other_size: str = ""
    """Clause on the size of images that the initial weights were made for, if it is another one."""
    source: str | None = None
    """Folder or URL that the images came from, if it is known."""
    resumed_with_changes: str | None = None
    """Differences in provenance with which the run was resumed, if any."""


def model_card(
    facts: TrainingFacts,
    train_counts: Sequence[int],
    run_id: str,
    code_version: str | None,
    storage: Storage,
    note: str = "",
) -> str:
    """Return the model card in Markdown.

    Args:
        facts: The training run.
        train_counts: Number of images in the split `train`, by class.
        run_id: Id of the MLflow run.
        code_version: Commit of the code, or None if it is unknown.
        storage: Storage with the table.
        note: A sentence about the figures, or an empty string.
    """
    sections = [
        f"# {markdown_text(facts.train.model)}, {len(facts.manifest.classes)} classes",
        "\n\n".join([_results(facts), *([markdown_text(note)] if note else [])]),
        _weakest(facts, train_counts),
        _limits(facts, train_counts),
        _unknown(facts),
        _data(facts),
        _training(facts),
        _reproduction(facts, run_id, code_version, storage),
    ]
    return "\n\n".join(sections) + "\n"


def _results(facts: TrainingFacts) -> str:
    test, best = facts.test, facts.history[facts.best_epoch]
    rows = []
    for field in fields(EpochMetrics):
        metric = field.name.removeprefix("val_")
        if metric != field.name and hasattr(test, metric):
            rows.append([metric.replace("_", " "), f"{getattr(best, field.name):.4f}", f"{getattr(test, metric):.4f}"])
    rows.append(["calibration error", "", f"{test.calibration.error:.4f}"])
    rows.append(["calibration error before", "", f"{test.uncalibrated.error:.4f}"])
    total = int(test.confusion_KK.sum())
    if not total:
        return "## Results\n\nThe split `test` has no images: nothing was measured."
    low, high = wilson_interval(int(test.confusion_KK.diagonal().sum()), total)
    confidence, accuracy = test.calibration.mean_confidence, test.accuracy
    verdict = "overconfident" if confidence > accuracy else "underconfident"
    doubt = (
        f"**The model was tested on few images ({total}):** its accuracy on other images of this kind is between "
        f"{low:.2f} and {high:.2f}, with a confidence of 95 %. More images narrow this interval."
    )
    return "\n\n".join(
        [
            "## Results",
            *([doubt] if high - low > WIDE_INTERVAL else []),
            markdown_table(["metric", f"val, epoch {facts.best_epoch}", "test"], rows),
            f"On {total} test images the accuracy is {accuracy:.4f}, with a 95 % confidence interval (Wilson) from "
            f"{low:.4f} to {high:.4f}. It holds for images that were not used to choose among models: for a registered "
            "version, the section Promotion says how many challengers they have judged. The mean probability of the "
            f"predicted classes is {confidence:.4f}: the model is {verdict} by {abs(confidence - accuracy):.4f}. The "
            f"calibration error is the expected calibration error over {NUM_BINS} bins (Guo et al. 2017), after and "
            f"before the logits are divided by the temperature {facts.temperature:.4f}, which was fitted on the split "
            "`val`.",
            *_folds(facts),
            _serving(facts),
        ]
    )


def _folds(facts: TrainingFacts) -> list[str]:
    if facts.folds is None:
        return []
    return [
        "In a cross-validation with {} parts of `train` and `val`, a head on the features before fine-tuning has a "
        "mean accuracy of {:.4f}, and a 95 % interval from {:.4f} to {:.4f}.".format(facts.train.folds, *facts.folds)
    ]


def _serving(facts: TrainingFacts) -> str:
    """Return the sentences on the precision in which the model was tested and is served."""
    if (found := facts.difference) is None:
        return f"The model was tested, and is served, in {facts.precision}."
    return (
        f"The model was tested, and is served, in {facts.precision}; a device without instructions for it serves in "
        f"float32. On {found.images} test images, the probabilities of the labels differ by {found.mean:.4f} in the "
        f"mean and by {found.largest:.4f} at most between the two, and {found.changed_labels} labels differ."
    )


def _weakest(facts: TrainingFacts, train_counts: Sequence[int]) -> str:
    confusion_KK, classes = facts.test.confusion_KK, facts.manifest.classes
    true, predicted, hits = confusion_KK.sum(dim=1), confusion_KK.sum(dim=0), confusion_KK.diagonal()
    f1 = facts.test.class_f1
    weak = [index for index in f1.argsort(stable=True).tolist() if true[index] > 0 and f1[index] < 1][:NUM_WEAKEST]
    if not weak:
        return "## Weakest classes\n\nNo test image was misclassified."
    rows = [
        [
            markdown_text(classes[index]),
            str(train_counts[index]),
            str(int(true[index])),
            f"{int(hits[index]) / max(1, int(predicted[index])):.4f}",
            f"{int(hits[index]) / int(true[index]):.4f}",
            f"{float(f1[index]):.4f}",
        ]
        for index in weak
    ]
    wrong_KK = confusion_KK - torch.diag(hits)
    cells = wrong_KK.flatten().argsort(descending=True, stable=True)[:NUM_CONFUSIONS].tolist()
    pairs = [divmod(cell, len(classes)) for cell in cells]
    confusions = [
        f"- {markdown_text(classes[actual])} predicted as {markdown_text(classes[guess])}: "
        f"{int(wrong_KK[actual, guess])} of {int(true[actual])}"
        for actual, guess in pairs
        if wrong_KK[actual, guess] > 0
    ]
    return "\n\n".join(
        [
            "## Weakest classes",
            markdown_table(["class", "train images", "test images", "precision", "recall", "F1"], rows),
            "The most frequent confusions:",
            "\n".join(confusions),
        ]
    )


def _limits(facts: TrainingFacts, train_counts: Sequence[int]) -> str:
    classes, size = facts.manifest.classes, facts.manifest.image_size
    names = join_names([markdown_text(name) for name in classes[:NUM_LISTED_CLASSES]], len(classes))
    fewest, most = (chosen(range(len(classes)), key=train_counts.__getitem__) for chosen in (min, max))
    points = [
        f"It distinguishes these classes: {names}. Every image is assigned to one of them, even if it shows "
        "none, unless `predict.unknown_rate` is set.",
        f"Every image is scaled to fit {size} x {size} pixels before inference.",
        "It was evaluated on images from its training source; its accuracy on images from other sources is unknown.",
        f"The class with the fewest training images is {markdown_text(classes[fewest])} ({train_counts[fewest]}), "
        f"the class with the most is {markdown_text(classes[most])} ({train_counts[most]}).",
    ]
    counts = facts.test.confusion_KK.sum(dim=1).tolist()
    few = [
        f"{markdown_text(name)} ({count})" for name, count in zip(classes, counts, strict=True) if count < FEW_IMAGES
    ]
    if few:
        points.append(
            f"Classes with fewer than {FEW_IMAGES} test images, whose metrics are therefore uncertain: "
            f"{join_names(few[:NUM_LISTED_CLASSES], len(few))}."
        )
    return "## Intended use and limits\n\n" + "\n".join(f"- {point}" for point in points)


def _unknown(facts: TrainingFacts) -> str:
    """Return the curve of false alarms: thresholds of the label `unknown`, and the images of the classes above them."""
    val, test, title = facts.scores, facts.test.scores, "## Images of no class"
    if (thresholds := val.thresholds()) is None:
        return f"{title}\n\nThe split `val` has no images to fit thresholds on, so the model has no `unknown_score`."
    rows = [
        [f"{rate:g}", f"{threshold:.4f}", *(f"{split.share_above(threshold):.4f}" for split in (val, test))]
        for rate, threshold in zip(RATES, thresholds, strict=True)
    ]
    return "\n\n".join(
        [
            title,
            "The `unknown_score` of an image is the generalized entropy of its probabilities (Liu et al. 2023): 0 if "
            "one class has all of the probability, 1 if all classes have the same. With `predict.unknown_rate`, images "
            "above the threshold of this false-alarm rate get the label `unknown`. The thresholds were fitted on the "
            f"{len(val.ascending)} images of the split `val`. No image is above a threshold of 1: the images were too "
            "few for the rate.",
            markdown_table(["unknown_rate", "threshold", "false alarms, val", "false alarms, test"], rows),
            "A false alarm is an image of the classes above the threshold. The fraction of images of no class above it "
            "was not measured: the run has none.",
        ]
    )


def _data(facts: TrainingFacts) -> str:
    manifest = facts.manifest
    rows = [
        *([["images from", markdown_code(facts.source)]] if facts.source else []),
        ["table", markdown_code(manifest.table.path)],
        ["version", str(manifest.table.version)],
        ["content digest", markdown_code(manifest.content_digest)],
        ["cache digest", markdown_code(facts.cache.digest)],
        ["decoding", str(manifest.decoding)],
        *([["images that cannot be decoded", str(len(manifest.quarantined))]] if manifest.quarantined else []),
        *([f"images of the split {split}", str(part.rows)] for split, part in manifest.splits.items()),
    ]
    return "## Data\n\n" + markdown_table(["item", "value"], rows)


def _training(facts: TrainingFacts) -> str:
    train, best = facts.train, facts.history[facts.best_epoch]
    monitor = monitored(train)
    trained = {"head": "only the new head, on a frozen backbone", "all": "the whole network"}.get(
        train.trained, "the new head, on a frozen backbone, then more layers"
    )
    num_images = facts.manifest.splits[TRAIN].rows
    batch = train.fitting_batch(facts.distributed.num_ranks if facts.distributed else 1, num_images)
    rows = [
        ["model", markdown_code(train.model)],
        ["initial weights", markdown_code(train.weights)],
        ["weights file" if train.weights == "DEFAULT" else "weights sha256", markdown_code(facts.weights_digest)]
        if facts.weights_digest != train.weights
        else [],
        ["image size", f"{facts.manifest.image_size} pixels; {facts.other_size}"] if facts.other_size else [],
        ["trained layers", trained],
        ["recipe", train.recipe],
        ["fine-tuning", markdown_text(facts.plan.reason)] if facts.plan else [],
        ["processes", f"{facts.num_ranks}, on {facts.device}"],
        ["gradients averaged by", f"{facts.distributed.backend}: {facts.backend_reason}"] if facts.distributed else [],
        ["batch size", f"{batch}, lowered from {train.batch_size}: the split `train` has {num_images} images"]
        if batch != train.batch_size
        else [],
        ["epochs", f"{len(facts.history)} of at most {facts.max_epochs}"],
        ["best epoch", f"{facts.best_epoch}, by {monitor} {getattr(best, monitor):.4f}"],
    ]
    settings = [
        [markdown_code(f"{stage}.{name}"), markdown_code(value), markdown_code(default)]
        for stage, name, value, default in _chosen(facts)
    ]
    chosen = markdown_table(["setting", "value", "default"], settings) if settings else "All settings are the defaults."
    tables = [markdown_table(["item", "value"], [row for row in rows if row]), *_phases(facts), chosen]
    return "\n\n".join(["## Training", *tables])


def _phases(facts: TrainingFacts) -> list[str]:
    """Return a table of the best epoch of each phase, in a list; an empty list with one phase."""
    monitor = monitored(facts.train)
    rows = []
    for name, count, best, is_chosen in _best_epochs(facts):
        values = f"{best.val_accuracy:.4f}", f"{getattr(best, monitor):.4f}"
        rows.append([markdown_text(name), f"{count}", str(best.epoch), *values, "chosen" if is_chosen else ""])
    if len(rows) < 2:
        return []
    return [markdown_table(["phase", "epochs", "best epoch", "val accuracy", monitor.replace("_", " "), ""], rows)]


def _best_epochs(facts: TrainingFacts) -> list[tuple[str, int, EpochMetrics, bool]]:
    """Return each phase's name, number of epochs, best epoch by the monitored metric, and whether it was chosen."""
    monitor = monitored(facts.train)
    best_of = min if lower_is_better(monitor) else max
    ends = [start for start, _name in facts.phases[1:]] + [len(facts.history)]
    return [
        (name, len(epochs), best_of(epochs, key=attrgetter(monitor)), start <= facts.best_epoch < end)
        for (start, name), end in zip(facts.phases, ends, strict=False)  # A run of release 0.1.0 has none.
        if (epochs := facts.history[start:end])
    ]


def why_chosen(facts: TrainingFacts) -> str:
    """Return why these weights were chosen, as a sentence; empty if there was one phase."""
    if len(found := _best_epochs(facts)) < 2:
        return ""
    heads, others = (
        [best.val_accuracy for name, _count, best, _is_chosen in found if name.startswith(HEAD_NAME) == is_head]
        for is_head in (True, False)
    )
    chosen = next(name for name, _count, _best, is_chosen in found if is_chosen)
    compared = f"val accuracy {max(heads):.4f} of the head" + (f", {max(others):.4f} after it" if others else "")
    planned = f"; fine-tuning: {facts.plan.reason}" if facts.plan else ""
    return f"'{chosen}' is the best by {monitored(facts.train)} ({compared}){planned}"


def _reproduction(facts: TrainingFacts, run_id: str, code_version: str | None, storage: Storage) -> str:
    flow = "train" if facts.distributed is None else "train_distributed"
    options = [
        option
        for stage, name, value, _default in _chosen(facts)
        for option in (f"--{stage}.{name}", str(value) if isinstance(value, str | None) else json.dumps(value))
    ]
    table = ["--table_version", str(facts.manifest.table.version), *storage.options]
    rows = [
        ["MLflow run", markdown_code(run_id)],
        [
            "code version",
            markdown_code(code_version) if code_version else "unknown: not a git checkout, and not set by an image",
        ],
        *([["changed when resumed", markdown_code(facts.resumed_with_changes)]] if facts.resumed_with_changes else []),
    ]
    return "\n\n".join(
        [
            "## Reproduction",
            markdown_table(["item", "value"], rows),
            "With this code, in the folder of its checkout:",
            markdown_fence(flow_command(flow, *table, *options), "sh"),
            "The run's `config.json` has all settings, and its parameters the versions of the packages. The same "
            "settings on the same data are not trained twice: the flow returns this run unless it was deleted.",
        ]
    )


def _chosen(facts: TrainingFacts) -> list[tuple[str, str, object, object]]:
    """Return the settings that differ from the defaults: stage, name, value, default."""
    stages: list[tuple[str, dict[str, object], BaseModel]] = [
        # Only the decisive ones: a retention period, for instance, does not affect training.
        ("cache", dict(facts.manifest.settings.decisive()), CacheConfig()),
        ("train", facts.train.model_dump(mode="json"), TrainConfig()),
    ]
    if facts.distributed is not None:
        stages.append(("distributed", facts.distributed.model_dump(mode="json"), DistributedConfig()))
    return [
        (stage, name, value, default)
        for stage, settings, defaults in stages
        for name, value in sorted(settings.items())
        if value != (default := defaults.model_dump(mode="json")[name])
    ]
