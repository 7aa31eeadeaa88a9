"""What data validation found in a version of the tables, as figures and as rows for a person."""

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict

from tasks.refs import TableRef
from tasks.schema import SPLITS
from tasks.text.printable import printable

NUM_LISTED = 20
"""Near-duplicates and quarantined files that are listed; all of them are counted."""


Shown = Annotated[str, AfterValidator(printable)]
"""A name as tables, logs and artifacts show it to a user."""


class NearPair(BaseModel):
    """Two images in different splits that look alike; paths are relative to the source."""

    model_config = ConfigDict(frozen=True)

    bits: int
    """In how many of 64 bits their hashes differ."""
    path: Shown
    label: Shown
    split: str
    other_path: Shown
    other_label: Shown
    other_split: str


class BadFile(BaseModel):
    """A quarantined file; the path is relative to the source."""

    model_config = ConfigDict(frozen=True)

    path: Shown
    reason: str
    detail: Shown | None


class DataChecks(BaseModel):
    """What one version of the tables holds. Sizes are in pixels, of the original images."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    images: TableRef
    files: TableRef
    classes: dict[str, dict[str, int]]
    outcomes: dict[str, int]
    reasons: dict[str, int]
    widths: dict[str, int]
    heights: dict[str, int]
    leaked: int
    """Contents in more than one split."""
    near_duplicates: int
    """Pairs of images in different splits that look alike."""
    near_duplicates_complete: bool
    near_duplicate_bits: int
    nearest: list[NearPair]
    quarantined: list[BadFile]
    """The first by path, NUM_LISTED at most."""

    @property
    def class_sizes(self) -> dict[str, int]:
        """Images by label, over all splits."""
        return {label: sum(counts.values()) for label, counts in self.classes.items()}

    @property
    def imbalance_ratio(self) -> float:
        """The largest class as a multiple of the smallest."""
        sizes = self.class_sizes.values()
        return max(sizes) / min(sizes) if sizes else 1.0

    @property
    def quarantined_fraction(self) -> float:
        """Share of the files that are there."""
        total = sum(self.outcomes.values())
        return sum(self.reasons.values()) / total if total else 0.0

    def metrics(self) -> dict[str, float]:
        """Return the figures by name, for a tracking server."""
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
        """Return the checks for a person, a row each."""
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
            ("duplicates", self.outcomes.get("duplicate", 0), "files with the content of another one"),
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
