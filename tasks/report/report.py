"""The report of a training run, logged to MLflow: tables, figures, event file and model card."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from tasks.cache.loader import read_images, sample_classes
from tasks.explain.explainer import HeatOfPackage
from tasks.metrics.evaluate import EpochMetrics, Evaluation
from tasks.metrics.mistakes import mistake_table
from tasks.refs import TEST, TRAIN
from tasks.report import (
    CALIBRATION_FILE,
    CLASSES_FILE,
    CONFUSION_FILE,
    IMAGES_FILE,
    LEARNING_CURVES_FILE,
    MISTAKES_FILE,
    MISTAKES_TABLE,
    MODEL_CARD_FILE,
    UNKNOWN_FILE,
)
from tasks.report.figures import (
    draw_calibration,
    draw_classes,
    draw_confusion,
    draw_learning_curves,
    draw_mistakes,
    draw_unknown,
    images_per_class,
)
from tasks.report.fonts import drawn_with_fonts
from tasks.report.image_names import image_files
from tasks.report.model_card import TrainingFacts, model_card
from tasks.storage import Storage
from tasks.text.markup import printable
from tasks.tracking.tracked_run import TrackedRun

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

logger = logging.getLogger("lakevision.report")


def class_table(evaluation: Evaluation, classes: Sequence[str]) -> dict[str, list[object]]:
    """Return the number of images, precision, recall and F1 (0-1) of each of K classes, as columns by name.

    A class that is never predicted has precision 0.
    """
    hits = evaluation.confusion_KK.diagonal().double()
    true = evaluation.confusion_KK.sum(dim=1).double()
    predicted = evaluation.confusion_KK.sum(dim=0).double()
    return {
        "class": list(map(printable, classes)),
        "images": true.long().tolist(),
        "precision": (hits / predicted.clamp(min=1)).tolist(),
        "recall": (hits / true.clamp(min=1)).tolist(),
        "f1": evaluation.class_f1.tolist(),
    }


def scalar_tag(name: str) -> str:
    """Return the tag of a metric: `loss/val` for `val_loss`, which TensorBoard then shows beside `loss/train`."""
    split, _, rest = name.partition("_")
    return f"{rest}/{split}" if split in {"train", "val"} else name


@contextmanager
def event_file(folder: Path, name: str) -> "Iterator[SummaryWriter]":
    """Write one event file in the block, with a name that is the same when it is written again.

    Args:
        folder: Folder of the file, which has no other.
        name: Suffix of the file's name.
    """
    # Here and not at the top: only rank 0 needs TensorBoard, and only then.
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as writer:
        yield writer
    (written,) = folder.glob("events.out.tfevents.*")
    written.rename(folder / f"events.out.tfevents.{name}")


def write_event_file(folder: Path, history: Sequence[EpochMetrics], name: str) -> None:
    """Write one event file with all epochs, with the number of the epoch as the step.

    It is written at the end and not during training, so that a resumed run has each epoch in it only once.

    Args:
        folder: Folder of the file.
        history: Metrics of the epochs, in order.
        name: Suffix of the file's name, so that a repeated call for the same run replaces the file.
    """
    with event_file(folder, name) as writer:
        for metrics in history:
            for field, value in asdict(metrics).items():
                if field != "epoch" and isinstance(value, int | float):
                    writer.add_scalar(scalar_tag(field), value, metrics.epoch)


def log_report(
    run: TrackedRun, facts: TrainingFacts, train_counts: Sequence[int], storage: Storage, heat: HeatOfPackage
) -> None:
    """Log the report of a finished training run; an earlier report is replaced.

    Args:
        run: The MLflow run.
        facts: The training run.
        train_counts: Number of images in the split `train`, by class.
        storage: Storage with the tables that have the paths of the images.
        heat: Heat maps of the model, for the mistakes.

    Raises:
        CacheDamaged: The cached images of the mistakes were changed or damaged.
    """
    test, classes = facts.test, facts.manifest.classes
    run.log_table(class_table(test, classes), CLASSES_FILE)
    rows = [mistake.row for mistake in test.mistakes]
    table = mistake_table(test.mistakes, image_files(facts.manifest, TEST, rows, storage), classes)
    names = list(map(str, table["image"]))
    with drawn_with_fonts([*classes, *names]) as lacking:
        run.log_figure(draw_confusion(test.confusion_KK, classes), CONFUSION_FILE)
        run.log_figure(draw_calibration(test.calibration), CALIBRATION_FILE)
        run.log_figure(draw_unknown(facts.scores, test.scores), UNKNOWN_FILE)
        run.log_figure(draw_learning_curves(facts.history, facts.best_epoch), LEARNING_CURVES_FILE)
        sample = sample_classes(facts.cache.url, facts.manifest, TRAIN, images_per_class(len(classes)))
        run.log_figure(draw_classes(sample, classes), IMAGES_FILE)
        if rows:
            run.log_table(table, MISTAKES_TABLE)
            # Read again, since batches may be of features.
            images_NHWC = read_images(facts.cache.url, facts.manifest, TEST, rows)
            images_NHWC = heat.beside(images_NHWC, [mistake.predicted for mistake in test.mistakes])
            run.log_figure(draw_mistakes(images_NHWC, test.mistakes, names, classes), MISTAKES_FILE)
    if lacking:
        logger.warning("%s", lacking)
    with TemporaryDirectory() as scratch:
        write_event_file(Path(scratch), facts.history, run.run_id)
        run.log_folder(Path(scratch), "tensorboard")
    card = model_card(facts, train_counts, run.run_id, run.code_version, storage, lacking)
    run.log_text(card, MODEL_CARD_FILE)
    run.describe(card)
