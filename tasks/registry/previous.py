"""The version that was the champion before: its alias, and the tag that the alias follows."""

from tasks import tracking
from tasks.refs import ModelRef
from tasks.storage import Storage

CHAMPION = "champion"
PREVIOUS = "previous"


def previous_champion(storage: Storage, champion: ModelRef) -> ModelRef | None:
    """Return the version that was the champion before this one, or None if there was none or it was deleted."""
    number = tracking.version_tags(storage, champion).get(tracking.PREVIOUS_TAG)
    return None if number is None else tracking.numbered_version(storage, champion.name, number)


def repair_previous(storage: Storage, champion: ModelRef) -> None:
    """Set the alias `previous` to the version before the champion, or remove it if there is none.

    The alias follows the champion's tag, which was written before it became the champion: after a kill between the two
    aliases, the next promotion or rollback sets it.
    """
    wanted = previous_champion(storage, champion)
    if tracking.model_with_alias(storage, champion.name, PREVIOUS) == wanted:
        return
    if wanted is None:
        tracking.remove_alias(storage, champion.name, PREVIOUS)
    else:
        tracking.set_alias(storage, wanted, PREVIOUS)
