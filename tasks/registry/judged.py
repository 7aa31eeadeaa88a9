"""The challengers that the same test images have judged, noted as tags of the registered model.

The tags outlive versions and runs. A challenger has one, so that a promotion that is repeated counts once.
"""

import logging
from collections.abc import Sequence

from pydantic import Field, ValidationError

from tasks.refs import Ref, RunRef
from tasks.storage import Storage
from tasks.tracking import models

logger = logging.getLogger("lakevision.registry")

JUDGED_TAG = "lakevision.judged."
"""Prefix of the tags of a registered model, followed by the MLflow run id of a challenger."""

NUM_SAMPLED = 32
"""Number of images by which two sets of test images are compared; a share of one half is known within 0.18."""

SAME_SHARE = 0.5
"""Share of images from which on two sets are the same: a few new or deleted ones must not start the count anew."""


class Judged(Ref):
    """The test images on which a challenger was compared with the champion."""

    content_digest: str
    """Digest of all images in the table version of the challenger's run; empty if it is unknown."""
    sample: tuple[str, ...] = Field((), max_length=NUM_SAMPLED)
    """The smallest hashes of the test images, of 32 bits each; none if the table is gone."""
    number: int = Field(1, ge=1)
    """Number of challengers that these images had judged then, this one included."""

    def same_images(self, other: "Judged") -> bool:
        """Return whether two challengers were compared on the same images, or on sets of which most are the same.

        Two sets of which nothing is known count as the same, so that an unknown set does not start the count anew.
        """
        is_unknown = not (self.content_digest or self.sample or other.sample)
        if self.content_digest == other.content_digest and (self.content_digest or is_unknown):
            return True
        return similarity(self.sample, other.sample) >= SAME_SHARE


def similarity(one: Sequence[str], other: Sequence[str]) -> float:
    """Return the estimated share (0-1) of images in both of two sets among the images in either; 0 without images.

    Source: the sketch of the smallest hashes, Broder, "On the resemblance and containment of documents",
    Compression and Complexity of Sequences 1997.

    Args:
        one: Sample of the first set.
        other: Sample of the second set.
    """
    either = sorted({*one, *other})[:NUM_SAMPLED]
    return len({*either} & {*one} & {*other}) / len(either) if either else 0.0


def note_judged(storage: Storage, name: str, run: RunRef, content_digest: str, sample: tuple[str, ...] = ()) -> int:
    """Note that test images judge a challenger; return the number of challengers that they have judged, with this one.

    A challenger that they judged before keeps its number, so that the decision on it is the same again.

    Args:
        storage: Storage with the tracking URI.
        name: Name of the registered model, whose champion is challenged.
        run: The challenger.
        content_digest: As in `Judged`.
        sample: As in `Judged`.
    """
    known = _known(storage, name)
    found, own = Judged(content_digest=content_digest, sample=sample), known.pop(run.run_id, None)
    if own is not None and own.same_images(found):
        number = own.number
    else:
        number = 1 + sum(found.same_images(other) for other in known.values())
    noted = found.model_copy(update={"number": number})
    if noted != own:
        models.tag_model(storage, name, f"{JUDGED_TAG}{run.run_id}", noted.model_dump_json())
    return number


def _known(storage: Storage, name: str) -> dict[str, Judged]:
    known = {}
    for tag, value in models.model_tags(storage, name).items():
        if tag.startswith(JUDGED_TAG):
            try:
                known[tag.removeprefix(JUDGED_TAG)] = Judged.model_validate_json(value)
            except ValidationError:
                logger.warning("the tag %s of '%s' in MLflow is not valid: it is ignored", tag, name)
    return known
