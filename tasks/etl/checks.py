"""Results of data validation for one version of the tables, as metrics and as rows of a report."""

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict

from tasks.refs import TableRef
from tasks.schema import SPLITS
from tasks.text.printable import printable

NUM_LISTED = 20
"""Maximum number of near-duplicates and of quarantined files that are listed; all of them are counted."""


Printable = Annotated[str, AfterValidator(printable)]
"""A name as tables, logs and artifacts show it to a user."""


class NearPair(BaseModel):
    """Two similar images in different splits; paths are relative to the source."""

    model_config = ConfigDict(frozen=True)

    bits: int
    """Hamming distance of their 64-bit hashes."""
    path: Printable
    label: Printable
    split: str
    other_path: Printable
    other_label: Printable
    other_split: str


class BadFile(BaseModel):
    """A quarantined file; the path is relative to the source."""

    model_config = ConfigDict(frozen=True)

    path: Printable
    reason: str
    detail: Printable | None


class DataChecks(BaseModel):
    """Results of data validation for one version of the tables; sizes are those of the original images in pixels."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    images: TableRef
    files: TableRef
    classes: dict[str, dict[str, int]]
    outcomes: dict[str, int]
    reasons: dict[str, int]
    widths: dict[str, int]
    heights: dict[str, int]
    leaked: int
    """Number of distinct contents that are in more than one split."""
    near_duplicates: int
    """Number of pairs of similar images in different splits."""
    near_duplicates_complete: bool
    near_duplicate_bits: int
    nearest: list[NearPair]
    quarantined: list[BadFile]
    """The first NUM_LISTED quarantined files, ordered by path."""

    @property
    def class_sizes(self) -> dict[str, int]:
        """Number of images by label, over all splits."""
        return {label: sum(counts.values()) for label, counts in self.classes.items()}

    @property
    def imbalance_ratio(self) -> float:
        """Size of the largest class divided by the size of the smallest."""
        sizes = self.class_sizes.values()
        return max(sizes) / min(sizes) if sizes else 1.0

    @property
    def quarantined_fraction(self) -> float:
        """Fraction of the source's files that are quarantined."""
        total = sum(self.outcomes.values())
        return sum(self.reasons.values()) / total if total else 0.0

    def metrics(self) -> dict[str, float]:
        """Return the metrics by name, as they are logged to the tracking server."""
        return {
            "images": sum(self.class_sizes.values()),
            "classes": len(self.classes),
            "imbalance_ratio": self.imbalance_ratio,
            "quarantined_fraction": self.quarantined_fraction,
            "duplicates": self.outcomes.get("duplicate", 0),
            "leaked": self.leaked,
            "near_duplicates": self.near_duplicates,
        }

    def rows(self) -> list[dict[str, str]]:
        """Return one row per check for display: its name, value and detail."""
        sizes = self.class_sizes
        smallest, largest = (choose(sizes, key=lambda label: sizes[label], default="") for choose in (min, max))
        by_split = {split: sum(counts.get(split, 0) for counts in self.classes.values()) for split in SPLITS}
        facts = [
            ("images", sum(sizes.values()), _listed(by_split)),
            (
                "classes",
                len(sizes),
                f"smallest {smallest} {sizes.get(smallest, 0)}, largest {largest} {sizes.get(largest, 0)}",
            ),
            ("imbalance ratio", f"{self.imbalance_ratio:.2f}", "largest class / smallest class"),
            ("width in pixels", self.widths.get("median", 0), _listed(self.widths)),
            ("height in pixels", self.heights.get("median", 0), _listed(self.heights)),
            ("quarantined", f"{self.quarantined_fraction:.2%}", _listed(self.reasons) or "none"),
            ("duplicates", self.outcomes.get("duplicate", 0), "files with the same content as another file"),
            ("leaked", self.leaked, "contents in more than one split"),
            (
                "near-duplicates",
                f"{'' if self.near_duplicates_complete else 'at least '}{self.near_duplicates}",
                f"pairs in different splits, at most {self.near_duplicate_bits} of 64 bits apart",
            ),
        ]
        return [{"check": name, "value": str(value), "detail": detail} for name, value, detail in facts]


def _listed(values: dict[str, int]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())
