"""Limits of memory for processes of a test, which need the right to make a cgroup."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

CGROUPS = Path("/sys/fs/cgroup")


@contextmanager
def memory_cgroup(name: str, limit: int) -> Iterator[Path]:
    """Make a memory cgroup of either version with a limit in bytes; yield the file that takes process ids."""
    version_1 = (CGROUPS / "memory").is_dir()
    folder = (CGROUPS / "memory" if version_1 else CGROUPS) / name
    with ExitStack() as made:
        try:
            folder.mkdir()
            made.callback(folder.rmdir)
            (folder / ("memory.limit_in_bytes" if version_1 else "memory.max")).write_text(str(limit))
        except OSError as error:
            pytest.skip(f"needs the right to make a memory cgroup: {error}")
        yield folder / "cgroup.procs"
