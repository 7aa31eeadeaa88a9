"""Cross-validation of the head on cached features: its accuracy on images that no part of the training has seen.

Each image of the splits `train` and `val` is tested once. The features are those of the backbone before fine-tuning.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from pydantic import TypeAdapter
from torch import nn

from tasks.cache.loader import InMemoryLoader
from tasks.cache.manifest import CacheManifest, CacheSplit
from tasks.cache.write import FEATURE_GROUP_BYTES, rows_in_group
from tasks.collectives.reducer import Reducer, run_on_rank_zero
from tasks.config.recipe import phases_of
from tasks.metrics.evaluate import evaluate
from tasks.model.training_network import copy_of_state
from tasks.progress.activity import working
from tasks.refs import TEST, TRAIN, VAL
from tasks.train.context import TrainingContext
from tasks.train.features import StandardizedHead, materialize_features, raised, read_features
from tasks.train.loop import fit
from tasks.train.phases import make_trainable, trains_on_features
from tasks.train.progress import new_progress

logger = logging.getLogger("lakevision.train")

ACCURACIES = TypeAdapter(list[float])

MAX_ROWS = 50_000
"""Images of a cross-validation, of which more are a random sample: their features are in memory."""


class RowsLoader(InMemoryLoader):
    """A loader of some rows of features that are in memory."""

    def __init__(
        self, context: TrainingContext, features: CacheManifest, split: str, held: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        """Take the rows.

        Args:
            context: The training run.
            features: Manifest of the features.
            split: The split that the rows stand for; `train` is shuffled.
            held: Features, float32 (N, F), and labels, int64 (N,).
        """
        train, labels_N, rows = context.spec.train, held[1].numpy(), len(held[1])
        in_group = rows_in_group(rows, features.row_bytes, FEATURE_GROUP_BYTES)
        part = CacheSplit(rows=rows, rows_per_group=in_group, files=())
        batch_size = train.fitting_batch(context.ranks.num_virtual, rows)
        super().__init__(
            context.spec.cache.url,
            features.model_copy(update={"splits": {split: part}}),
            split,
            train.reference_batch_size if batch_size == "auto" else batch_size,
            seed=train.seed if split == TRAIN else None,
            ranks=context.ranks_of(split),
            balanced_N=labels_N if split == TRAIN and train.sampling == "balanced" else None,
        )
        self._held = held


def cross_validate(context: TrainingContext) -> list[float]:
    """Return the accuracy of the head on each of `train.folds` parts; a collective operation.

    With one part as the test, another is `val`, and the others `train`. Each head has another seed. An empty list if
    the model's head takes no features.
    """
    if not trains_on_features(context):
        logger.warning("train.folds is left out: the head of '%s' takes no features", context.spec.train.model)
        return []
    context.features = context.features or materialize_features(context, (TRAIN, VAL))
    url, features = context.features
    with working("cross-validating the head"):
        return run_on_rank_zero(context.reducer, ACCURACIES, lambda: _test_folds(context, url, features))


def _test_folds(context: TrainingContext, url: str, features: CacheManifest) -> list[float]:
    number, seed = context.spec.train.folds, context.spec.train.seed
    inputs_NF, labels_N = read_features(url, features, seed, MAX_ROWS)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(labels_N)))
    # Dealt out class by class, so that all parts have nearly the same classes.
    dealt = order[labels_N[order].argsort(stable=True)]
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # As in training a head, whose weights are the same for any number of threads.
    found = []
    try:
        for fold in range(number):
            parts = {TEST: [fold], VAL: [(fold + 1) % number]}
            parts[TRAIN] = [other for other in range(number) if other not in {*parts[TEST], *parts[VAL]}]
            train = context.spec.train.model_copy(update={"seed": seed + fold})
            own = replace(context, spec=context.spec.model_copy(update={"train": train}), reducer=Reducer())
            rows = {split: torch.cat([dealt[one::number] for one in some]) for split, some in parts.items()}
            held = {split: (inputs_NF[some], labels_N[some]) for split, some in rows.items()}
            loaders = {split: RowsLoader(own, features, split, some) for split, some in held.items()}
            found.append(_test_head(own, loaders, held[TRAIN][0]))
    finally:
        torch.set_num_threads(num_threads)
    logger.info("accuracy of the head in %d parts: %s", number, ", ".join(f"{one:.4f}" for one in found))
    return found


def _test_head(context: TrainingContext, loaders: dict[str, RowsLoader], inputs_NF: torch.Tensor) -> float:
    """Train a new head as a training run does, and return its accuracy on the split `test`."""
    train, classes = context.spec.train, len(context.manifest.classes)
    torch.manual_seed(train.seed)
    head = nn.Linear(inputs_NF.shape[1], classes).to(context.device)
    model: nn.Module = head
    if train.recipe != "given":
        deviation_F = raised(inputs_NF.std(dim=0, correction=0))
        model = StandardizedHead(head, inputs_NF.mean(dim=0).to(context.device), deviation_F.to(context.device))
    progress = new_progress(train)
    for phase in phases_of(train):
        if phase.unfreeze_from is not None:
            break
        progress.phase, progress.first_epoch = phase.number, progress.next_epoch
        progress.stopping = replace(progress.stopping, epochs_without_improvement=0)
        progress.best_state = copy_of_state(model)
        trainable = make_trainable(context, phase, progress, model, dict(loaders))
        fit(model, loaders, trainable.optimizer, trainable.loop, progress, lambda _metrics, _progress: None)
    return evaluate(model, loaders[TEST], classes, context.device, context.reducer).accuracy


def mean_and_interval(accuracies: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean accuracy over the parts, and its 95 % interval.

    The parts share training images, so that their variance is too small: it is corrected as by Nadeau and Bengio,
    "Inference for the Generalization Error" (2003), equation 9, with Student's t.
    """
    from scipy.stats import t  # Here: only the process that logs the results needs it.

    number, values = len(accuracies), np.array(accuracies)
    half = t.ppf(0.975, number - 1) * np.sqrt((1 / number + 1 / (number - 1)) * values.var(ddof=1))
    mean = float(values.mean())
    return mean, max(0.0, mean - float(half)), min(1.0, mean + float(half))
