"""Results of promotions and rollbacks, and the figures that a promotion is decided by."""

from typing import Literal

from tasks.refs import ModelRef, Ref, RunRef
from tasks.text.markup import markdown_text

Outcome = Literal["promoted", "kept", "unchanged", "waiting"]
"""unchanged: the best run is already the champion. waiting: it is within all limits, and a user must approve it."""


class ClassComparison(Ref):
    """Recall of one class by two models on the same images."""

    label: str
    images: int
    champion: float
    """Fraction of the images of this class that the champion classifies correctly, 0-1."""
    challenger: float
    only_challenger: int = 0
    """Images of this class that only the challenger classifies correctly."""
    only_champion: int = 0


class Comparison(Ref):
    """Figures of challenger and champion on the same test images."""

    images: int
    left_out: int
    """Test images that one of the models was trained or tuned on, which do not count."""
    challenger_accuracy: float
    """Fraction of images that are classified correctly, 0-1."""
    champion_accuracy: float
    challenger_macro_f1: float
    """Unweighted mean of the F1 scores of the classes that have images, 0-1."""
    champion_macro_f1: float
    only_challenger: int
    """Images that only the challenger classifies correctly."""
    only_champion: int
    p_value: float
    """Two-sided p-value of McNemar's exact test: the probability of such a difference between models that are equal."""
    classes: tuple[ClassComparison, ...]
    """All classes that have images, by label."""
    challenger_milliseconds: float | None = None
    """Median time from one encoded image to its prediction, in milliseconds; None if it was not measured."""
    champion_milliseconds: float | None = None
    table_version: int | None = None
    """Version of the table with the images: the newest at the time of the comparison."""
    num_judged: int = 1
    """Number of challengers that these images have judged, with this one."""
    unseen: tuple[str, ...] = ()
    """Classes of the champion without an image, by label."""


class Approval(Ref):
    """The answer of a user who was asked whether a run becomes the champion."""

    approved: bool
    by: str
    """Name that the user gave."""
    comment: str
    champion_version: int | None
    """Version with which the run was compared when the user was asked; None without a champion."""


class Promotion(Ref):
    """The champion after a promotion, and the reason for it."""

    champion: ModelRef
    """If the run waits for an approval, the version that would become the champion."""
    outcome: Outcome
    challenger: RunRef
    """The best of the candidate runs."""
    challenger_accuracy: float
    """Accuracy on the split `test`, 0-1."""
    champion_accuracy: float | None
    """Accuracy of the previous champion, 0-1; None if there was none."""
    challenger_images: int | None
    """Number of test images of the challenger; None if its run does not record it."""
    champion_images: int | None
    reason: str
    comparison: Comparison | None = None
    """Figures on the same images; None if the two were not compared image by image."""
    previous: ModelRef | None = None
    """The champion before the decision; None if there was none."""
    approved_by: str | None = None
    """Name of the user who approved or refused it; None if nobody was asked."""

    @property
    def sentence(self) -> str:
        """The decision as a sentence."""
        champion = f"{self.champion.name} version {self.champion.version}"
        outcomes = {
            "promoted": "is the champion",
            "kept": "stays the champion",
            "unchanged": "is the champion already",
            "waiting": "waits for an approval",
        }
        return f"{champion} {outcomes[self.outcome]}: {self.reason}"


class Rollback(Ref):
    """The champion after a rollback."""

    champion: ModelRef
    rolled_back: ModelRef
    """The version that was the champion before."""
    reason: str
    is_repeated: bool = False
    """Whether an earlier run did it."""

    @property
    def sentence(self) -> str:
        """The rollback as a sentence."""
        rolled_back = f"{self.champion.name} version {self.rolled_back.version} was rolled back"
        if self.is_repeated:
            return f"{rolled_back} before; version {self.champion.version} is the champion"
        why = f": {self.reason}" if self.reason else ""
        return f"{rolled_back} to version {self.champion.version}{why}"


def promotion_section(sentence: str) -> str:
    """Return the section of a model card on the last decision about the model."""
    return f"## Promotion\n\n{markdown_text(sentence)}."
