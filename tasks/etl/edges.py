"""Images near the edge of two splits: those that may be dealt another split than their content alone gives them.

A worker writes them into parts of their own, so that few parts are written again: of a thousand images in a part there
is nearly always one that is dealt otherwise.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Self

import pyarrow as pa
import pyarrow.compute as pc

from tasks.config.etl import EtlConfig

DEVIATIONS = 4
"""An edge is so many standard deviations wide on each side: beyond it is one edge in sixteen thousand."""


def draw_of(sha256: str, seed: int) -> float:
    """Return an image's place in the order in which splits take images, a number below 1."""
    return int(hashlib.sha256(f"{seed}:{sha256}".encode()).hexdigest()[:15], 16) / 16**15


@dataclass(frozen=True)
class Edges:
    """Where the edges between splits may lie in each class.

    Attributes:
        seed: Of the split.
        cuts: Where they lie by the fractions.
        sizes: By label, how many images are dealt.
    """

    seed: int
    cuts: tuple[float, float]
    sizes: Mapping[str, int]

    @classmethod
    def of(cls, etl: EtlConfig, listing: pa.Table) -> Self:
        """Return the edges for the listed files, all taken for images."""
        counts = pc.value_counts(listing["label"]).to_pylist()
        sizes = {found["values"]: found["counts"] for found in counts if found["values"] is not None}
        return cls(etl.split_seed, (etl.test_fraction, etl.test_fraction + etl.val_fraction), sizes)

    def has(self, sha256: str, label: str) -> bool:
        """Return whether an image is near an edge: the place of the k-th of n images varies as a binomial share."""
        draw, size = draw_of(sha256, self.seed), self.sizes[label]
        return any(
            0 < cut < 1 and abs(draw - cut) < DEVIATIONS * sqrt(cut * (1 - cut) / size) + 1 / size for cut in self.cuts
        )
