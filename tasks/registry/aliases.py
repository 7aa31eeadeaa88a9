"""The aliases of a registered model, and the tags that they follow."""

from tasks.refs import ModelRef
from tasks.storage import Storage
from tasks.tracking import models
from tasks.tracking.trained_tables import NOT_PROMOTED_TAG

CHAMPION = "champion"
CHALLENGER = "challenger"
"""Alias of the version that was last compared with the champion, and did not replace it."""
PREVIOUS = "previous"

CHAMPION_TAG = "lakevision.champion"
"""Tag of a registered model with the number of the last champion: MLflow deletes an alias with its version."""


def previous_champion(storage: Storage, champion: ModelRef) -> ModelRef | None:
    """Return the version that was the champion before this one, or None if there was none or it was deleted."""
    version: ModelRef | None = champion
    seen = set()
    while version is not None and version.version not in seen:
        seen.add(version.version)
        tags = models.version_tags(storage, version)
        # A rollback that was killed before the alias moved left its tag on a champion.
        if version != champion and models.ROLLED_BACK_TAG not in tags:
            return version
        number = tags.get(models.PREVIOUS_TAG)
        version = None if number is None else models.numbered_version(storage, champion.name, number)
    return None


def repair_aliases(storage: Storage, champion: ModelRef) -> None:
    """Set the alias `previous` to the version before the champion, or remove it if there is none.

    The alias follows the champion's tag, which was written before it became the champion: after a kill between the
    aliases, the next promotion or rollback sets them. The champion is not its own challenger. The registered model
    notes that it has a champion, so that the next one is not taken for the first if this one is deleted.
    """
    wanted = previous_champion(storage, champion)
    if models.model_with_alias(storage, champion.name, PREVIOUS) != wanted:
        if wanted is None:
            models.remove_alias(storage, champion.name, PREVIOUS)
        else:
            models.set_alias(storage, wanted, PREVIOUS)
    if models.model_with_alias(storage, champion.name, CHALLENGER) == champion:
        models.remove_alias(storage, champion.name, CHALLENGER)
    models.untag_version(storage, champion, NOT_PROMOTED_TAG)
    if models.model_tags(storage, champion.name).get(CHAMPION_TAG) != str(champion.version):
        models.tag_model(storage, champion.name, CHAMPION_TAG, str(champion.version))
