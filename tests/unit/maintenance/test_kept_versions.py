"""The versions that a clean-up keeps where the table images is missing."""

from pathlib import Path
from typing import Any

import pytest

from tasks.config.maintenance import MaintainConfig
from tasks.maintenance.kept_versions import kept_versions
from tasks.storage import Storage


def found_in(storage: Storage) -> list[int] | None:
    """Return the versions to keep, which needs no session without a table."""
    spark: Any = None
    return kept_versions(spark, MaintainConfig(), storage)


def test_only_a_missing_table_has_nothing_to_keep(storage: Storage) -> None:
    """A log without commits may be of a table that is being created, and a folder may not be readable."""
    assert found_in(storage) == []
    Path(storage.table("images"), "_delta_log").mkdir(parents=True)
    assert found_in(storage) is None
    blocked = Path(storage.home, "file")
    blocked.touch()
    with pytest.raises(NotADirectoryError):
        found_in(storage.model_copy(update={"tables": str(blocked)}))
