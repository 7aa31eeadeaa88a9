"""File systems by their mounts, from lists of mounts of other machines."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tasks.system.locks import mount_of


def mounted(folder: str, kind: str, options: str = "rw") -> list[SimpleNamespace]:
    """Return the mounts of a machine with one file system besides its disk."""
    return [
        SimpleNamespace(mountpoint=place, fstype=found, opts=given)
        for place, found, given in (("/", "ext4", "rw"), (folder, kind, options))
    ]


@pytest.mark.parametrize(
    ("kind", "is_shared"),
    [
        ("nfs4", True),
        ("cifs", True),
        ("lustre", True),
        ("fuse.s3fs", True),
        ("fuse.sshfs", True),
        ("fuse", True),
        ("ext4", False),
        ("tmpfs", False),
        ("fuseblk", False),
        ("fuse.mergerfs", False),
    ],
)
def test_file_system_of_other_machines_is_shared(kind: str, is_shared: bool) -> None:
    """A file system is shared if its kind is one of a network; an NTFS disk (fuseblk) is not."""
    assert mount_of(Path("/mnt/data/tables/images"), mounted("/mnt/data", kind)).is_shared() is is_shared


@pytest.mark.parametrize(
    ("kind", "options", "holds"),
    [
        ("nfs", "rw,vers=3,local_lock=none", True),
        ("nfs4", "rw,local_lock=none", True),
        ("nfs", "rw,nolock", False),
        ("nfs4", "rw,local_lock=flock", False),
        ("nfs4", "rw,local_lock=all", False),
        ("fuse.sshfs", "rw", False),
        ("cifs", "rw", False),
    ],
)
def test_locks_of_nfs_hold_on_all_machines_unless_an_option_keeps_them_local(
    kind: str, options: str, holds: bool
) -> None:
    """Only NFS is known to send file locks to its server."""
    assert mount_of(Path("/mnt/data"), mounted("/mnt/data", kind, options)).excludes_other_machines() is holds


def test_innermost_and_newest_mount_of_a_folder_is_found() -> None:
    """A folder whose name begins with that of a mount is not in it, and a newer mount hides an older one."""
    mounts = [*mounted("/mnt/data", "nfs4"), *mounted("/mnt/data/fast", "ext4"), *mounted("/mnt/data/fast", "xfs")]

    found = {path: mount_of(Path(path), mounts).kind for path in ("/mnt/data2", "/mnt/data/a", "/mnt/data/fast/a", "/")}

    assert found == {"/mnt/data2": "ext4", "/mnt/data/a": "nfs4", "/mnt/data/fast/a": "xfs", "/": "ext4"}


def test_temporary_folder_is_found_on_this_machine(tmp_path: Path) -> None:
    """The mounts of this machine are read, and the folder need not exist."""
    found = mount_of(tmp_path / "missing")

    assert str(tmp_path).startswith(found.folder)
    assert found.kind != "unknown"
