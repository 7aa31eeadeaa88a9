"""Exclusive locks for runs that write to the same location, released even if a process is killed.

File locks of a file system that other machines mount may not hold there.
"""

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import filelock
import psutil

from tasks.errors import LockLost
from tasks.paths import local_path

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger("lakevision.locks")

T = TypeVar("T")

NETWORK_KINDS = frozenset(
    {
        *("9p", "afs", "beegfs", "ceph", "cifs", "gfs2", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "ocfs2"),
        *("orangefs", "panfs", "pvfs2", "smb3", "smbfs", "wekafs"),
    }
)
"""Kinds of file systems that several machines mount, by their names in /proc/mounts."""

LOCAL_FUSE_KINDS = frozenset(
    f"fuse.{name}" for name in ("bindfs", "encfs", "fuse-overlayfs", "gocryptfs", "lxcfs", "mergerfs")
)
"""Kinds of file systems in user space whose files are on this machine; others may be anywhere."""


class Mount(NamedTuple):
    """The file system of a folder."""

    folder: str
    kind: str
    options: frozenset[str]

    def is_shared(self) -> bool:
        """Return whether other machines may mount it as well."""
        # Mountpoint for S3 and blobfuse2 are mounted as `fuse`, without a name.
        is_fuse = self.kind == "fuse" or self.kind.startswith("fuse.")
        return self.kind in NETWORK_KINDS or (is_fuse and self.kind not in LOCAL_FUSE_KINDS)

    def excludes_other_machines(self) -> bool:
        """Return whether a file lock of this machine is known to exclude all other writers.

        Linux sends the locks of NFS to its server, unless an option keeps them on this machine (nfs(5)).
        """
        if self.kind in {"nfs", "nfs4"}:
            return not self.options & {"nolock", "local_lock=all", "local_lock=flock"}
        return not self.is_shared()


def mount_of(folder: Path, mounted: Iterable[Any] | None = None) -> Mount:
    """Return the file system of a folder, which need not exist.

    Args:
        folder: A local folder.
        mounted: All mounted file systems, as psutil describes them; None for those of this machine.
    """
    path = os.path.realpath(folder)
    found = Mount("/", "unknown", frozenset())
    for each in psutil.disk_partitions(all=True) if mounted is None else mounted:
        inside = path == each.mountpoint or path.startswith(f"{each.mountpoint.rstrip('/')}/")
        if inside and len(each.mountpoint) >= len(found.folder):  # the last of several mounts on one folder is visible
            found = Mount(each.mountpoint, each.fstype, frozenset(each.opts.split(",")))
    return found


LeaseCheck = Callable[[], None]
"""A function that raises LockLost if another process may have acquired a lock that this one holds by a lease."""

ServerLock = Callable[[str], AbstractContextManager[LeaseCheck]]
"""A function that returns a context in which this process has the exclusive lock of a folder or URL on all machines."""

_LEASES: ContextVar[tuple[LeaseCheck, ...]] = ContextVar("checks of the leases that this run holds", default=())

_SERVER_LOCK: ContextVar[ServerLock | None] = ContextVar("lock of locations that several machines share", default=None)


@contextmanager
def _set_within(variable: ContextVar[T], value: T) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def locking_with(server_lock: ServerLock) -> AbstractContextManager[None]:
    """Let `exclusive_lock` acquire `server_lock` too within the block, for locations that several machines share."""
    return _set_within(_SERVER_LOCK, server_lock)


@contextmanager
def exclusive_lock(url: str, spark: "SparkSession | None" = None) -> Iterator[None]:
    """Acquire the exclusive lock of a folder or URL for the duration of the block, waiting for other processes.

    Data read before may have changed once the lock is acquired. The lock file beside a local folder is never removed: a
    file that another process waits for must not be replaced. File locks may not hold between machines, and an object
    store has none. There, the lock is the one given to `locking_with`; without it, writers must tolerate other ones.

    Args:
        url: Folder or URL, which need not exist.
        spark: Session whose JVM writes; the JVM outlives a killed driver for a moment, and so holds a lock, too.
    """
    path, server_lock = local_path(url), _SERVER_LOCK.get()
    with ExitStack() as held:
        if path is not None:
            waits = partial(logger.info, "another run writes to %s: waiting until it ends", url)
            held.enter_context(lock_once_free(Path(f"{path}.lock"), waits))
        if path is None or mount_of(path).is_shared():
            if server_lock is not None:
                held.enter_context(leased(held.enter_context(server_lock(url))))
            elif warning := unlocked_warning(url):
                logger.warning("%s", warning)
        if path is not None and spark is not None:
            held.enter_context(_held_by_jvm(spark, path))
        yield


def leased(check: LeaseCheck) -> AbstractContextManager[None]:
    """Let `check_leases` call `check` too within the block: the right of this run to write has an end."""
    return _set_within(_LEASES, (*_LEASES.get(), check))


def check_leases() -> None:
    """Check that this run still has all locks that it holds by a lease, before it writes what they protect.

    Raises:
        LockLost: Another process may have acquired one of them.
    """
    for check in _LEASES.get():
        check()


def lock_lost(url: str, reason: object) -> LockLost:
    """Return the error of a lock whose lease may have ended."""
    return LockLost(
        f"the exclusive lock of '{url}' was not renewed ({reason}), so that another driver may write there by now",
        way_out="nothing was committed; run again once its server answers",
    )


def excludes_other_machines(url: str) -> bool:
    """Return whether the file lock of a folder excludes all other writers; it does not on a store.

    Files of others are removed only under such a lock: the Prefect server's may have been lost meanwhile.
    """
    path = local_path(url)
    return path is not None and mount_of(path).excludes_other_machines()


def unlocked_warning(url: str) -> str | None:
    """Return the warning about a folder whose locks may not exclude other machines, or None."""
    path = local_path(url)
    mount = None if path is None or _SERVER_LOCK.get() is not None else mount_of(path)
    if mount is None or mount.excludes_other_machines():
        return None
    return (
        f"'{url}' is on a file system ({mount.kind}) whose locks may hold on this machine only: run one driver at a "
        "time, or set PREFECT_API_URL to a Prefect server, which then has the locks"
    )


@contextmanager
def lock_if_free(file: Path | str) -> Iterator[bool]:
    """Acquire a file lock for the duration of the block, unless another process holds it; yield whether it is held.

    The file stays: another process may wait for it, and a new file of this name would be another lock.
    """
    try:
        held = filelock.FileLock(file).acquire(timeout=0)
    except filelock.Timeout:
        yield False
    else:
        with held:
            yield True


@contextmanager
def lock_once_free(file: Path, announce: Callable[[], None]) -> Iterator[None]:
    """Acquire a file lock for the duration of the block, after waiting for it; its folder is created.

    Args:
        file: The file.
        announce: Called before a wait.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(file)
    try:
        held = lock.acquire(timeout=0)
    except filelock.Timeout:
        announce()
        held = lock.acquire()
    with held:
        yield


@contextmanager
def _held_by_jvm(spark: "SparkSession", path: Path) -> Iterator[None]:
    """Let the JVM hold a file lock until the block or the JVM ends, waiting for a JVM that lost its driver."""
    jvm: Any = spark._jvm
    channel = jvm.java.io.RandomAccessFile(f"{path}.jvm.lock", "rw").getChannel()
    try:
        if channel.tryLock() is None:
            logger.info("the JVM of a run that was killed still writes to %s: waiting until it ends", path)
            while channel.tryLock() is None:
                time.sleep(0.1)
        yield
    finally:
        channel.close()
