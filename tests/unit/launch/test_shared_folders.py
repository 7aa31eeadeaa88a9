"""Folders that all hosts of a training run must share."""

from pathlib import Path

import pytest

from tasks.config.storage import StorageConfig
from tasks.launch.shared_folders import shared_folders
from tasks.storage import resolve_storage


@pytest.mark.parametrize("chosen", [None, "/shared/artifacts"])
def test_artifacts_that_a_server_keeps_are_not_in_a_shared_folder(tmp_path: Path, chosen: str | None) -> None:
    """With a tracking server, only a chosen folder has artifacts; with a database, that of the home has them."""
    home = str(tmp_path)
    storage = resolve_storage(StorageConfig(home=home, tracking="http://mlflow:5000", artifacts=chosen))
    assert shared_folders(storage, f"{storage.cache}/0f").get("storage.artifacts") == chosen
    storage = resolve_storage(StorageConfig(home=home, artifacts=chosen))
    assert shared_folders(storage, f"{storage.cache}/0f")["storage.artifacts"] == (chosen or f"{home}/artifacts")
