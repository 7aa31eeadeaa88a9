"""Pins: the versions of a table that registered models need, noted in the table's own folder.

A clean-up asks one tracking server, and a table may be shared by several. So each server has a folder below `_pins`,
with an object for each version, whose name is its number. Delta ignores names with an underscore, and a pin makes no
commit. Promotions and clean-ups add objects and rewrite none, so that concurrent writers lose no pin on any store.
"""

import hashlib
import logging
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from mlflow.entities.model_registry import ModelVersion

from tasks.errors import WrongInput
from tasks.object_store import file_system, list_names
from tasks.paths import local_path, resolved
from tasks.refs import TableRef
from tasks.spark.session import NeedsSpark
from tasks.storage import Storage
from tasks.system.disk import check_writable, translate_disk_full
from tasks.tables.delta import check_table_path
from tasks.tables.snapshots import newest_snapshot
from tasks.tracking.server import all_results, client_of, found_or_none, prepare_tracking
from tasks.tracking.trained_tables import trained_versions

logger = logging.getLogger("lakevision.tracking")

PINS = "_pins"
"""Name of the folder in a table's folder."""

SERVER = "server"
"""Name of the object with the URI of a tracking server, without credentials, for messages."""

CHECKED = "checked"
"""Name of the object that says that a clean-up of this server knew all promoted runs, or was trusted."""

SERVER_ID, VERSION = re.compile(r"[0-9a-f]{16}"), re.compile(r"\d{1,18}")

DENIED = (PermissionError, FileExistsError, NotADirectoryError, IsADirectoryError)
"""Errors of a folder that another attempt does not change."""


@dataclass(frozen=True)
class ServerPins:
    """The versions of a table that one tracking server pinned.

    Attributes:
        shown: URI of the server when it pinned last, without credentials.
        versions: The versions.
        is_checked: Whether a clean-up of the server knew all promoted runs, or was trusted.
    """

    shown: str
    versions: frozenset[int]
    is_checked: bool = False


def tracking_id(storage: Storage) -> str:
    """Return the identity of a tracking server or database: 16 hexadecimal digits.

    It is a digest of the time in milliseconds at which its experiment was created, so a new database has another one.
    A moved home, a renamed host and another login do not change it.
    """
    experiment = client_of(storage).get_experiment(prepare_tracking(storage))
    return hashlib.sha256(f"{experiment.experiment_id}|{experiment.creation_time}".encode()).hexdigest()[:16]


@contextmanager
def _accessible(path: str, use: str) -> Iterator[None]:
    """Translate errors about the folder of the pins, which repeating does not change, into one sentence.

    Raises:
        WrongInput: The folder cannot be read or written.
    """
    try:
        yield
    except DENIED as error:
        raise WrongInput(
            f"the pins in '{path}/{PINS}', by which clean-ups keep the versions of models, cannot be {use} "
            f"({type(error).__name__}: {error})",
            way_out="give this user access to that folder; nothing was removed or promoted",
        ) from error


def read_pins(path: str) -> dict[str, ServerPins]:
    """Return the pins of a table by the identity of the tracking server.

    Args:
        path: Path or URL of the table.

    Raises:
        WrongInput: The folder cannot be read, or has other files than pins.
    """
    filesystem, root = file_system(path)
    found = {}
    with _accessible(path, "read"):
        for server in _visible(f"{path}/{PINS}"):
            is_server = SERVER_ID.fullmatch(server) is not None
            names = _visible(f"{path}/{PINS}/{server}") if is_server else []
            odd = [name for name in names if name not in (SERVER, CHECKED) and VERSION.fullmatch(name) is None]
            if odd or not is_server:
                raise WrongInput(
                    f"'{'/'.join([path, PINS, server, *odd[:1]])}' is not a pin, so which versions models need is "
                    "not known and nothing is removed",
                    way_out="remove it if it is not yours",
                )
            shown = filesystem.cat_file(f"{root}/{PINS}/{server}/{SERVER}") if SERVER in names else b""
            versions = frozenset(int(name) for name in names if VERSION.fullmatch(name))
            shown_text = shown.decode(errors="replace").strip() or "unknown"
            found[server] = ServerPins(shown_text, versions, CHECKED in names)
    return found


def _visible(folder: str) -> list[str]:
    """Return the names in a folder, without those that a file system adds, such as `.nfs0001`."""
    return sorted(name for name in list_names(folder) if not name.startswith("."))


def write_pins(path: str, server: str, shown: str, versions: Iterable[int], *, is_checked: bool = False) -> None:
    """Pin versions of a table; those that are pinned stay as they are.

    Args:
        path: Path or URL of the table.
        server: Identity of the tracking server.
        shown: Its URI without credentials.
        versions: The versions.
        is_checked: As in `ServerPins`; a server that was checked once stays so.

    Raises:
        WrongInput: The folder cannot be written.
    """
    filesystem, root = file_system(path)
    folder = f"{root}/{PINS}/{server}"
    with _accessible(path, "written"):
        if local_path(path) is not None:
            filesystem.makedirs(folder, exist_ok=True)
        names = set(list_names(f"{path}/{PINS}/{server}"))
        # The server first: after a kill, its versions are missing, and others are refused all the same.
        if SERVER not in names or filesystem.cat_file(f"{folder}/{SERVER}") != shown.encode():
            filesystem.pipe_file(f"{folder}/{SERVER}", shown.encode())
        for name in sorted({*map(str, versions), *([CHECKED] if is_checked else [])} - names):
            filesystem.pipe_file(f"{folder}/{name}", b"")


def release_pins(path: str, server: str, versions: Iterable[int]) -> None:
    """Remove pins of a tracking server.

    Raises:
        WrongInput: The folder cannot be written.
    """
    filesystem, root = file_system(path)
    with _accessible(path, "removed"):
        for version in versions:
            filesystem.rm_file(f"{root}/{PINS}/{server}/{version}")


def check_pins(storage: Storage, table: TableRef | None) -> None:
    """Check before work that a version of a table is pinned or can be, without leaving a file.

    Args:
        storage: Storage with the tracking URI.
        table: As for `pin_trained_versions`.

    Raises:
        WrongInput: The pins cannot be read or written, as in a table that this user may only read.
    """
    table = _present_table(storage, table)
    if table is None:
        return
    server = tracking_id(storage)
    pinned = read_pins(table.path).get(server)
    if pinned is None or table.version not in pinned.versions:
        check_writable(
            f"{table.path}/{PINS}/{server}", "the folder by whose pins clean-ups keep the versions of models"
        )


def pin_trained_versions(storage: Storage, table: TableRef | None) -> None:
    """Pin the versions of a table that the registered models of this tracking server need.

    Args:
        storage: Storage with the tracking URI.
        table: The table, which may have moved with the home; None for a model whose table is not known.

    Raises:
        WrongInput: The pins cannot be written.
        DiskFull: The disk is full.
    """
    table = _present_table(storage, table)
    if table is None:
        return
    versions = versions_to_keep(table, trained_versions(storage))
    with translate_disk_full(table.path, storage.home):
        write_pins(table.path, tracking_id(storage), storage.tracking_shown, versions)


def _present_table(storage: Storage, table: TableRef | None) -> TableRef | None:
    """Return a table with its present path, in the storage if it is the same table; None if it is gone or unknown."""
    if table is None:
        return None
    own = storage.table("images")
    try:
        is_own, was_there = resolved(table.path) == resolved(own), check_table_path(table.path)
    except (WrongInput, ValueError):  # any user can edit a run's parameters
        is_own = was_there = False
    found = None if is_own else newest_without_spark(own)
    if found is not None and table.table_id and found.table_id == table.table_id:
        # The home was moved or copied: nothing is written outside it.
        return table.model_copy(update={"path": own})
    return table if was_there else None


def newest_without_spark(path: str) -> TableRef | None:
    """Return the newest version of a table, or None if the table does not exist or only Spark can read it."""
    try:
        found = newest_snapshot(None, path)
    except NeedsSpark:
        return None
    return None if found is None else found.table


def missing_runs(storage: Storage, run_ids: Iterable[str]) -> list[str]:
    """Return those of the MLflow runs that this server has neither as a run nor as the run of a registered version."""
    client = client_of(storage)
    models: Iterator[ModelVersion] = all_results(lambda token: client.search_model_versions(page_token=token))
    registered = {model.run_id for model in models}
    # MLflow finds a deleted one, too, until it is purged.
    return [run_id for run_id in sorted(set(run_ids) - registered) if found_or_none(client.get_run, run_id) is None]


def versions_to_keep(table: TableRef, trained: Iterable[TableRef]) -> list[int]:
    """Return the versions of this table among those that models were trained from.

    Tables are matched by id, independent of their path. References without an id are matched by path, or else by the
    table's name, since the table may have been moved, and another may be at its old path now. Keeping too many versions
    costs disk space; keeping too few loses a model's data.
    """
    own_path, versions = resolved(table.path), set()
    for ref in trained:
        if ref.table_id and table.table_id:
            if ref.table_id == table.table_id:
                versions.add(ref.version)
            continue
        path = _resolved_path(ref)
        if path != own_path and os.path.basename(path) == os.path.basename(own_path):
            logger.warning(
                "a model was trained from version %d of '%s', which has no table id: kept as version %d of '%s', "
                "since the table may have been moved",
                ref.version, ref.path, ref.version, table.path,
            )  # fmt: skip
        elif path != own_path:
            continue
        versions.add(ref.version)
    return sorted(versions)


def _resolved_path(table: TableRef) -> str:
    """Return the resolved path of a table, or the text itself if it is not a path: any user can edit a model's tags."""
    try:
        return resolved(table.path)
    except (WrongInput, ValueError) as error:
        logger.warning(
            "a model was trained from version %d of '%s', which is not a path (%s): only its name is compared",
            table.version, table.path, error,
        )  # fmt: skip
        return table.path.rstrip("/")
