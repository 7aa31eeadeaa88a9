"""Images near the edge between two splits, whose final split may differ from that of their hash alone.

A worker writes these images into separate parts. Otherwise nearly every part would be rewritten: of a thousand images,
at least one usually gets another split.
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
"""Half-width of an edge in standard deviations; the true edge lies outside in one of sixteen thousand cases."""


def draw_of(sha256: str, seed: int) -> float:
    """Return an image's position in the order in which images are assigned to splits, in [0, 1)."""
    return int(hashlib.sha256(f"{seed}:{sha256}".encode()).hexdigest()[:15], 16) / 16**15


@dataclass(frozen=True)
class Edges:
    """Expected positions of the edges between splits in each class.

    Attributes:
        seed: Seed of the split.
        cuts: Positions that follow from the fractions.
        sizes: Number of images to assign, by label.
    """

    seed: int
    cuts: tuple[float, float]
    sizes: Mapping[str, int]

    @classmethod
    def of(cls, etl: EtlConfig, listing: pa.Table) -> Self:
        """Return the edges for the listed files, under the assumption that all of them are valid images."""
        counts = pc.value_counts(listing["label"]).to_pylist()
        sizes = {found["values"]: found["counts"] for found in counts if found["values"] is not None}
        return cls(etl.split_seed, (etl.test_fraction, etl.test_fraction + etl.val_fraction), sizes)

    def has(self, sha256: str, label: str) -> bool:
        """Return whether an image is near an edge; the position of the k-th of n images varies as a binomial share."""
        draw, size = draw_of(sha256, self.seed), self.sizes[label]
        return any(
            0 < cut < 1 and abs(draw - cut) < DEVIATIONS * sqrt(cut * (1 - cut) / size) + 1 / size for cut in self.cuts
        )
