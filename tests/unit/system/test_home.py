"""Permissions of the home folder and of its databases."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.config.storage import StorageConfig
from tasks.errors import WrongInput
from tasks.storage import resolve_storage
from tasks.system import home as home_module
from tasks.system.home import check_home, is_shared, make_home, make_private_file, rotate
from tasks.tracking.server import prepare_tracking


def mode(path: Path) -> int:
    """Return the permissions of a file or folder."""
    return path.stat().st_mode & 0o7777


@pytest.fixture(autouse=True)
def _usual_umask() -> Iterator[None]:
    """Let files be readable by all unless they are made otherwise."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def old_home(tmp_path: Path) -> Path:
    """Return a home as written by versions that left everything open to other users."""
    home = tmp_path / "home"
    for file in ("mlflow.db", "mlflow.db-wal", "prefect/prefect.db", "prefect/temporary.db", "studies/studies.db"):
        (home / file).parent.mkdir(parents=True, exist_ok=True)
        (home / file).touch()
    (home / "tables").mkdir()
    home.chmod(0o755)
    return home


def test_new_home_is_accessible_to_its_owner_only(tmp_path: Path) -> None:
    """A new home has mode 0700 regardless of the umask, and returns no log line."""
    home = tmp_path / "work" / "home"
    assert make_home(home) is None
    assert mode(home) == 0o700
    assert make_home(home) is None


def test_open_home_is_restricted_and_logged(tmp_path: Path) -> None:
    """A home of an earlier version is restricted once, both the folder and its databases."""
    home = old_home(tmp_path)
    assert make_home(home) == f"'{home}' was open to other users of this machine: now only its owner has access"
    assert mode(home) == 0o700
    assert {mode(file) for file in home.rglob("*.db*")} == {0o600}
    assert len(list(home.rglob("*.db*"))) == 5
    assert make_home(home) is None


def test_folder_with_other_files_stays_open_but_its_databases_do_not(tmp_path: Path) -> None:
    """A folder that holds other files is the user's own and keeps its mode; its databases are restricted."""
    home = old_home(tmp_path)
    (home / "thesis.tex").touch()
    line = make_home(home)
    assert mode(home) == 0o755
    assert {mode(file) for file in home.rglob("*.db*")} == {0o600}
    assert line is not None
    assert "mlflow.db, mlflow.db-wal, prefect/prefect.db" in line


@pytest.mark.parametrize("shared", [0o775, 0o2755, 0o1777])
def test_shared_home_is_unchanged(tmp_path: Path, shared: int) -> None:
    """A home that other users may write to keeps its mode, as they use the same tables and tracking."""
    home = old_home(tmp_path)
    home.chmod(shared)
    assert is_shared(home)
    assert make_home(home) is None
    assert mode(home) == shared
    assert {mode(file) for file in home.rglob("*.db*")} == {0o644}
    make_private_file(home / "new.db")
    assert not (home / "new.db").exists()


def test_tracking_database_of_a_new_home_is_accessible_to_its_owner_only(tmp_path: Path) -> None:
    """The database has mode 0600 even if only tracking is used, and so have the files that SQLite writes beside it."""
    home = tmp_path / "home"
    storage = resolve_storage(StorageConfig(home=str(home), tracking=f"sqlite:///{home}/mlflow.db"))
    prepare_tracking(storage)
    assert mode(home) == 0o700
    assert {mode(file) for file in home.glob("mlflow.db*")} == {0o600}
    assert (home / "mlflow.db").stat().st_size > 0


NOBODY = 65534
"""User id without any right of its own."""


@pytest.mark.parametrize(
    ("home", "closed"),
    [
        ("home", "home"),
        ("home", "home/logs"),
        ("home", "home/logs/spark.log"),
        ("home", "home/mlflow.db-wal"),
        ("new/home", "."),
    ],
)
def test_home_that_this_user_cannot_write_to_is_refused_in_a_sentence(home: str, closed: str) -> None:
    """A run of another user, or of the administrator in a container, may have left files in it."""
    user = os.geteuid()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "home" / "logs").mkdir(parents=True)
        (folder / "home" / "logs" / "spark.log").touch()
        (folder / "home" / "mlflow.db-wal").touch()
        used = resolve_storage(StorageConfig(home=str(folder / home))).home_entries
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o777)
        try:
            os.seteuid(NOBODY if user == 0 else user)
            check_home(folder / home, used)
            os.seteuid(user)
            (folder / closed).chmod(0o555)
            os.seteuid(NOBODY if user == 0 else user)
            with pytest.raises(WrongInput) as refused:
                check_home(folder / home, used)
        finally:
            os.seteuid(user)
            (folder / closed).chmod(0o777)
    assert f"cannot write to '{folder / closed}', whose owner has the id {user}: give a home" in str(refused.value)


def test_entries_that_a_run_does_not_write_to_may_belong_to_others(tmp_path: Path) -> None:
    """Tables, cache, artifacts and tracking may all be elsewhere; the rest is always in the home."""
    home, always = str(tmp_path), ("checkpoints", "logs", "spark-temp", "studies", "weights")
    assert resolve_storage(StorageConfig(home=home)).home_entries == (
        *always, "tables", "cache", "artifacts", "mlflow.db",
    )  # fmt: skip
    served = StorageConfig(home=home, tables="s3a://b/tables", cache="/elsewhere", tracking="http://127.0.0.1:5000")
    assert resolve_storage(served).home_entries == always


def test_log_that_another_process_rotates_is_left_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second copy would be that of the log which the first one has emptied."""
    log = tmp_path / "flows.log"
    monkeypatch.setattr(home_module, "MAX_LOG_BYTES", 10)
    log.write_bytes(b"a long first line\n")
    copied = home_module.shutil.copyfile

    def copy_while_another_rotates(*paths: str) -> None:
        copied(*paths)
        monkeypatch.setattr(home_module.shutil, "copyfile", copied)
        rotate(log)
        assert log.stat().st_size > 0

    monkeypatch.setattr(home_module.shutil, "copyfile", copy_while_another_rotates)
    rotate(log)
    assert (log.read_bytes(), (tmp_path / "flows.log.1").read_bytes()) == (b"", b"a long first line\n")


def test_long_log_is_rotated_while_a_process_appends_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One former part is kept; a server that runs for months writes on without opening its log again."""
    log = tmp_path / "prefect-server.log"
    rotate(log)  # before its first line
    monkeypatch.setattr(home_module, "MAX_LOG_BYTES", 10)
    with log.open("ab", buffering=0) as server:
        for lines in (b"first\n", b"second\n", b"third\n", b"a fourth line\n"):
            server.write(lines)
            rotate(log)
        server.write(b"fifth\n")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["prefect-server.log", "prefect-server.log.1"]
    assert (tmp_path / "prefect-server.log.1").read_bytes() == b"third\na fourth line\n"
    assert log.read_bytes() == b"fifth\n"
