"""A frozen backbone runs once a picture, not once a picture and epoch: the head trains on what it gave."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import nn

from tasks.cache.loader import Batch, CacheLoader
from tasks.train.fold import fold_batch_norm
from tasks.train.model import Classifier


def ends_in_head(classifier: Classifier, images_BHWC: torch.Tensor) -> bool:
    """Say whether the logits are exactly the head's output on a flat vector, so that features stand for pictures.

    Tried on real pictures, not guessed: squeezenet, for one, pools after its last layer.
    """
    seen: list[torch.Tensor] = []

    def remember(_module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        seen.extend((inputs[0], output))

    handle = classifier.head.register_forward_hook(remember)
    try:
        with torch.no_grad():
            logits = classifier.eval()(images_BHWC)
    finally:
        handle.remove()
    return len(seen) == 2 and seen[0].ndim == 2 and seen[1].shape == logits.shape and bool(torch.equal(seen[1], logits))


class FeatureLoader:
    """A loader's shard as features in memory (4 F bytes a picture), made in the first epoch, shuffled anew in each."""

    def __init__(self, loader: CacheLoader, classifier: Classifier, device: torch.device, seed: int | None) -> None:
        self._loader = loader
        self._classifier = classifier
        self._device = device
        self._seed = seed
        self._features: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        self.batch_size = loader.batch_size

    @property
    def num_steps(self) -> int:
        """Steps an epoch, the same on every rank."""
        return self._loader.num_steps

    def num_global_rows(self, step: int) -> int:
        """Return how many pictures all ranks together have in a step."""
        return self._loader.num_global_rows(step)

    def epoch(self, number: int) -> Iterator[Batch]:
        """Yield the batches of one epoch; `inputs` are float32 features (B, F)."""
        if self._features is None:
            self._features = self._extract()
        inputs, labels, rows = self._features
        if self._seed is not None:
            generator = np.random.default_rng((self._seed, number, self._loader.rank))
            order = torch.from_numpy(generator.permutation(len(labels)))
            inputs, labels, rows = inputs[order], labels[order], rows[order]
        for begin in range(0, self.num_steps * self.batch_size, self.batch_size):
            taken = slice(begin, begin + self.batch_size)
            yield Batch(inputs[taken], labels[taken], rows[taken].numpy())

    def _extract(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Run the backbone over the shard; the rows come ordered by number, whatever the reading order."""
        seen: list[torch.Tensor] = []
        labels: list[torch.Tensor] = []
        rows: list[torch.Tensor] = []
        classifier = fold_batch_norm(self._classifier)
        handle = classifier.head.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0].cpu()))
        try:
            with torch.inference_mode():
                for batch in self._loader.epoch(0):
                    if len(batch.labels_B):
                        classifier(batch.inputs.to(self._device, non_blocking=True))
                        labels.append(batch.labels_B)
                        rows.append(torch.from_numpy(batch.rows_B))
        finally:
            handle.remove()
        if not rows:
            empty = torch.empty(0, dtype=torch.int64)
            return torch.empty(0, 1), empty, empty
        order = torch.argsort(torch.cat(rows))
        # Cloned out of inference mode: autograd refuses inference tensors as inputs of a layer it trains.
        return torch.cat(seen)[order].clone(), torch.cat(labels)[order], torch.cat(rows)[order]
