"""File systems by their mounts: whether other machines share one, and whether its file locks hold there."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, Protocol

import psutil

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


class Mounted(Protocol):
    """A mounted file system, as psutil describes it."""

    mountpoint: str
    fstype: str
    opts: str


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

    def has_shared_locks(self) -> bool:
        """Return whether a file lock of this machine is known to exclude other machines, by the mount's options.

        Linux sends the locks of NFS to its server, unless an option keeps them on this machine (nfs(5)).
        """
        if self.kind not in {"nfs", "nfs4"}:
            return False
        return not self.options & {"nolock", "local_lock=all", "local_lock=flock"}

    def excludes_other_machines(self) -> bool:
        """Return whether a file lock of this machine excludes all other writers."""
        return not self.is_shared() or self.has_shared_locks()


def mount_of(folder: Path, mounted: Iterable[Mounted] | None = None) -> Mount:
    """Return the file system of a folder, which need not exist.

    Args:
        folder: A local folder.
        mounted: All mounted file systems; None for those of this machine.
    """
    path = os.path.realpath(folder)
    found = Mount("/", "unknown", frozenset())
    for each in psutil.disk_partitions(all=True) if mounted is None else mounted:
        inside = path == each.mountpoint or path.startswith(f"{each.mountpoint.rstrip('/')}/")
        if inside and len(each.mountpoint) >= len(found.folder):  # the last of several mounts on one folder is visible
            found = Mount(each.mountpoint, each.fstype, frozenset(each.opts.split(",")))
    return found
