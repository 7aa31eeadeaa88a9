"""Empty databases of Prefect's server: it takes seconds to create one, by running all migrations."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import filelock
import pytest

from tasks.system.home import PRIVATE_FOLDER, make_private_file
from tests.builders.homes import home_with_tracking
from tests.builders.processes import plain_environment


def copy_prefect_database(home: Path, factory: pytest.TempPathFactory, name: str = "prefect.db") -> None:
    """Copy an empty database of Prefect's server into a home, before the server that would create it starts.

    Args:
        home: Home folder.
        factory: Folders of this run of pytest, whose processes create one database between them.
        name: `prefect.db` of a stack's server, or `temporary.db` of that of a flow in a terminal.
    """
    folder = home / "prefect"
    for made in (home, folder):
        made.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
    make_private_file(folder / name)
    shutil.copyfile(_migrated(factory), folder / name)


def home_with_databases(factory: pytest.TempPathFactory, empty_tracking: Path, name: str = "prefect.db") -> Path:
    """Return a new home with empty databases of MLflow and of Prefect, as `copy_prefect_database`."""
    home = factory.mktemp("stack") / "home"
    home_with_tracking(home, empty_tracking)
    copy_prefect_database(home, factory, name)
    return home


def _migrated(factory: pytest.TempPathFactory) -> Path:
    own = factory.getbasetemp()
    # The processes of pytest-xdist have folders side by side.
    database = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "migrated.db"
    with filelock.FileLock(f"{database}.lock"):
        if not database.exists():
            new = database.with_suffix(".new")
            settings = {
                "PREFECT_HOME": str(own / "of-migration"),
                "PREFECT_SERVER_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{new}",
            }
            command = [sys.executable, "-m", "prefect", "server", "database", "upgrade", "--yes"]
            subprocess.run(command, env=plain_environment(**settings), check=True, capture_output=True, timeout=240)
            new.rename(database)
    return database
