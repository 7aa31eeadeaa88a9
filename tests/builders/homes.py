"""Home folders with an empty tracking database: MLflow takes seconds to create one, by running all migrations."""

import shutil
from pathlib import Path

from tasks.config.storage import StorageConfig
from tasks.storage import Storage, resolve_storage


def home_with_tracking(home: Path, empty_tracking: Path) -> Storage:
    """Create a home with a copy of an empty tracking database, and return its storage."""
    home.mkdir(parents=True)
    shutil.copy(empty_tracking, home)
    return resolve_storage(StorageConfig(home=str(home)))
