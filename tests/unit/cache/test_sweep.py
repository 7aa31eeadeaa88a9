"""The sweep of old caches: conditions of removal, locks, and folders that are never removed."""

import os
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import filelock
import pytest

from tasks.cache import sweep
from tasks.cache.manifest import MANIFEST, CacheFile, CacheManifest, CacheSplit
from tasks.cache.sweep import CacheReadLock, remove_unnamed, sweep_caches
from tasks.config.cache import CacheConfig
from tasks.config.train import TrainConfig
from tasks.refs import TableRef
from tests.builders.processes import ROOT

DAY = 86_400
NOW = 1_700_000_000.0


def add_cache(folder: Path, name: str, idle_days: float, size: int = 1000) -> Path:
    """Create the folder of a complete cache that was last used `idle_days` ago."""
    path = folder / name
    path.mkdir()
    (path / "train-00000-ab.parquet").write_bytes(bytes(size))
    (path / MANIFEST).write_text("{}")
    os.utime(path / MANIFEST, (NOW - idle_days * DAY,) * 2)
    return path


def names(folder: Path) -> set[str]:
    """Return the names of the remaining folders."""
    return {path.name for path in folder.iterdir() if path.is_dir()}


OLD, NEWER, NEW = "0" * 16, "1" * 16, "2" * 16


def test_caches_unused_for_keep_days_are_removed(tmp_path: Path) -> None:
    """Caches unused for more than 30 days are removed by default, and none with 0 or with None (older deployments)."""
    for name, days in ((OLD, 31), (NEWER, 29), (NEW, 0)):
        add_cache(tmp_path, name, days)

    assert sweep_caches(str(tmp_path), CacheConfig(keep_days=0), NOW) == []
    assert CacheConfig.model_validate({"keep_days": None}).keep_days == 0
    assert TrainConfig.model_validate({"keep_checkpoint_days": None}).keep_checkpoint_days == 0
    assert sweep_caches(str(tmp_path), CacheConfig(), NOW) == [OLD]
    assert names(tmp_path) == {NEWER, NEW}
    assert sweep_caches(str(tmp_path), CacheConfig(), NOW) == []


def test_last_use_counts_instead_of_age(tmp_path: Path) -> None:
    """A cache that was built long ago and read today is kept."""
    path = add_cache(tmp_path, OLD, 400)
    CacheReadLock(str(path)).close()

    assert sweep_caches(str(tmp_path), CacheConfig(), time.time() + 29 * DAY) == []
    assert sweep_caches(str(tmp_path), CacheConfig(), time.time() + 31 * DAY) == [OLD]


def test_least_recently_used_caches_are_removed_until_the_rest_fits(tmp_path: Path) -> None:
    """Of three caches of 0.6 GB two are removed for a limit of 1 GB, and none that was used within a day."""
    for name, days in ((OLD, 5), (NEWER, 3), (NEW, 2)):
        file = add_cache(tmp_path, name, days) / "train-00000-ab.parquet"
        with file.open("wb") as handle:
            handle.truncate(600_000_000)  # A sparse file.

    assert sweep_caches(str(tmp_path), CacheConfig(keep_gigabytes=2), NOW) == []
    assert sweep_caches(str(tmp_path), CacheConfig(keep_gigabytes=1), NOW) == [OLD, NEWER]
    with (tmp_path / NEW / "train-00000-ab.parquet").open("wb") as handle:
        handle.truncate(5_000_000_000)
    assert sweep_caches(str(tmp_path), CacheConfig(keep_gigabytes=1), NOW - 1.5 * DAY) == []


def test_cache_with_a_reader_is_kept(tmp_path: Path) -> None:
    """A cache of any age is kept while a reader holds its lock."""
    path = add_cache(tmp_path, OLD, 0)
    later = time.time() + 400 * DAY

    with closing(CacheReadLock(str(path))), closing(CacheReadLock(str(path))):
        assert sweep_caches(str(tmp_path), CacheConfig(), later) == []
    assert sweep_caches(str(tmp_path), CacheConfig(), later) == [OLD]


@pytest.mark.timeout(60)
def test_read_lock_is_released_when_its_process_is_killed(tmp_path: Path) -> None:
    """The read lock of a killed process does not prevent the removal of the cache."""
    path = add_cache(tmp_path, OLD, 0)
    program = (
        "from tasks.cache.sweep import CacheReadLock; "
        f"lock = CacheReadLock({str(path)!r})\nprint('held', flush=True)\ninput()"
    )
    reader = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "held\n"
        later = time.time() + 400 * DAY
        assert sweep_caches(str(tmp_path), CacheConfig(), later) == []
        reader.kill()
        reader.wait()
    assert sweep_caches(str(tmp_path), CacheConfig(), later) == [OLD]


def test_leftovers_of_a_killed_build_are_removed_and_running_builds_kept(tmp_path: Path) -> None:
    """An incomplete cache of any age is removed unless its builder holds the lock."""
    for name in (OLD, NEW):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train-00000-ab.parquet").write_bytes(b"half")

    with filelock.FileLock(tmp_path / f"{NEW}.lock"):
        assert sweep_caches(str(tmp_path), CacheConfig()) == [OLD]
        assert names(tmp_path) == {NEW}
    assert sweep_caches(str(tmp_path), CacheConfig()) == [NEW]


def test_young_files_stay_where_locks_do_not_exclude_other_machines(tmp_path: Path, monkeypatch) -> None:
    """There, another machine may be building the cache: its folder stays for a week, and its build is not discarded."""
    monkeypatch.setattr(sweep, "excludes_other_machines", lambda _url: False)
    young, old = tmp_path / NEW, tmp_path / OLD
    for folder, age in ((young, 0.0), (old, 1.1 * sweep.ABANDONED_SECONDS)):
        folder.mkdir()
        (folder / "train-00000-ab.parquet").write_bytes(b"half")
        for path in (folder / "train-00000-ab.parquet", folder):
            os.utime(path, (time.time() - age,) * 2)

    sweep.discard(str(young))
    assert sweep_caches(str(tmp_path), CacheConfig()) == [OLD]
    assert names(tmp_path) == {NEW}


def test_leftovers_of_a_killed_sweep_are_removed(tmp_path: Path) -> None:
    """A folder that a killed sweep renamed and did not remove is removed by the next sweep."""
    (tmp_path / f".{OLD}.swept-{'a' * 32}").mkdir()

    sweep_caches(str(tmp_path), CacheConfig())

    assert names(tmp_path) == set()


def test_sweep_ignores_other_folders_files_and_object_stores(tmp_path: Path) -> None:
    """Folders with other names, files and caches on object stores are never removed."""
    for name in ("my photos", "0" * 15, "0" * 17, "G" * 16):
        (tmp_path / name).mkdir()
    (tmp_path / OLD).write_text("a file")

    assert sweep_caches(str(tmp_path), CacheConfig(), NOW + 10_000 * DAY) == []
    assert len(names(tmp_path)) == 4
    assert sweep_caches("s3a://bucket/cache", CacheConfig()) == []
    assert sweep_caches(str(tmp_path / "gone"), CacheConfig()) == []


def test_files_that_the_manifest_does_not_name_are_removed(tmp_path: Path) -> None:
    """Files of retried Spark tasks, which the manifest does not name, are removed from a new cache."""
    file = CacheFile(name="train-00000-ab.parquet", rows=1, row_groups=1, bytes=4, sha256="")
    manifest = CacheManifest(
        format=2,
        table=TableRef(path="x", version=0),
        content_digest="",
        settings=CacheConfig(),
        classes=("a", "b"),
        splits={"train": CacheSplit(rows=1, rows_per_group=1, files=(file,))},
    )
    for name in (MANIFEST, file.name, "train-00000-cd.parquet"):
        (tmp_path / name).write_bytes(b"here")

    remove_unnamed(str(tmp_path), manifest)

    assert {path.name for path in tmp_path.iterdir()} == {MANIFEST, file.name}


def test_read_lock_creates_no_file_without_a_local_folder(tmp_path: Path) -> None:
    """A read lock of a missing folder or of an object store creates no lock file."""
    CacheReadLock(str(tmp_path / "gone" / OLD)).close()
    CacheReadLock("s3a://bucket/cache").close()

    assert list(tmp_path.iterdir()) == []
