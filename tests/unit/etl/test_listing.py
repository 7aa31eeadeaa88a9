"""Listing of the image files of a source, and checks of the source."""

import errno
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tasks.config.etl import EtlConfig
from tasks.errors import SourceUnavailable, WrongInput
from tasks.etl.choice import LeftOut, ListedFiles
from tasks.etl.listing import check_source, list_images, make_listing
from tasks.schema import LISTING_ARROW


def put(source: Path, *paths: str) -> None:
    """Write a file at each path below the source."""
    for path in paths:
        file = source / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"content")


def paths_of(source: Path) -> list[str]:
    """Return the listed paths."""
    return list_images(source).table()["path"].to_pylist()


def test_files_are_listed_with_folder_size_and_time(tmp_path: Path) -> None:
    """A listing has path, label, size in bytes, modification time, time of status change and inode of each file."""
    put(tmp_path, "cat/1.jpg", "dog/2.png")

    listing = list_images(tmp_path).table()

    assert listing.schema == LISTING_ARROW
    assert listing["path"].to_pylist() == ["cat/1.jpg", "dog/2.png"]
    assert listing["label"].to_pylist() == ["cat", "dog"]
    assert listing["size"].to_pylist() == [7, 7]
    modified = listing["modified_at"].cast("int64").to_pylist()
    status = (tmp_path / "cat/1.jpg").stat()
    assert modified[0] == status.st_mtime_ns // 1000
    assert listing["changed_at"].cast("int64").to_pylist()[0] == status.st_ctime_ns // 1000
    assert listing["inode"].to_pylist()[0] == status.st_ino


def test_label_is_the_folder_next_to_the_file(tmp_path: Path) -> None:
    """The innermost folder is the class, and a file at the top has no label."""
    put(tmp_path, "animals/cat/1.jpg", "loose.jpg")

    listing = list_images(tmp_path).table()

    assert dict(zip(listing["path"].to_pylist(), listing["label"].to_pylist(), strict=True)) == {
        "animals/cat/1.jpg": "cat",
        "loose.jpg": None,
    }


def test_hidden_files_and_folders_are_ignored(tmp_path: Path) -> None:
    """Thumbnail folders, AppleDouble files (._*) and dot files are not listed."""
    put(tmp_path, "cat/1.jpg", "cat/._1.jpg", "cat/.hidden.png", ".thumbnails/cat/1.jpg", "cat/.git/2.jpg")

    assert paths_of(tmp_path) == ["cat/1.jpg"]


def test_extensions_are_read_in_any_case(tmp_path: Path) -> None:
    """Extensions are case-insensitive, and files with other extensions and another content are ignored."""
    put(tmp_path, "cat/a.JPG", "cat/b.Jpeg", "cat/c.HeiC", "cat/notes.txt", "cat/d.jpg.bak", "cat/jpg", "cat/e.gif")

    assert paths_of(tmp_path) == ["cat/a.JPG", "cat/b.Jpeg", "cat/c.HeiC", "cat/e.gif"]


@pytest.mark.parametrize("name", ["mit leerzeichen", "größe-猫-🐈", "100%20x%", "a=b", "a,b", "q?x#y", "[x]*", "'\""])
def test_names_are_taken_literally(tmp_path: Path, name: str) -> None:
    """Spaces, Unicode, and characters that URLs or partition paths escape are kept in names."""
    put(tmp_path, f"{name}/{name}.jpg")

    listing = list_images(tmp_path).table()

    assert listing["path"].to_pylist() == [f"{name}/{name}.jpg"]
    assert listing["label"].to_pylist() == [name]


def test_source_itself_may_have_any_name(tmp_path: Path) -> None:
    """Paths are relative to the source, also if its name has special characters."""
    put(tmp_path / "my data=50% ä", "cat/1.jpg")

    assert paths_of(tmp_path / "my data=50% ä") == ["cat/1.jpg"]


def test_folder_with_the_name_of_an_image_is_a_folder(tmp_path: Path) -> None:
    """The files in a folder called cat.jpg are listed."""
    put(tmp_path, "cat.jpg/1.png")

    assert paths_of(tmp_path) == ["cat.jpg/1.png"]


def test_link_out_of_the_source_is_not_followed(tmp_path: Path) -> None:
    """Links to files and folders outside the source are ignored."""
    source, outside = tmp_path / "source", tmp_path / "source-of-others"
    put(source, "cat/1.jpg")
    put(outside, "secret/2.jpg")
    (source / "cat" / "link.jpg").symlink_to(outside / "secret" / "2.jpg")
    (source / "secret").symlink_to(outside / "secret")

    assert paths_of(source) == ["cat/1.jpg"]


def test_link_inside_the_source_is_followed(tmp_path: Path) -> None:
    """A linked file is listed under the link's path, with the size of its target."""
    put(tmp_path, "cat/1.jpg")
    (tmp_path / "pet").mkdir()
    (tmp_path / "pet" / "1.jpg").symlink_to(tmp_path / "cat" / "1.jpg")

    listing = list_images(tmp_path).table()

    assert listing["path"].to_pylist() == ["cat/1.jpg", "pet/1.jpg"]
    assert listing["size"].to_pylist() == [7, 7]


def test_linked_parent_folder_does_not_recurse_without_end(tmp_path: Path) -> None:
    """A link to a parent folder is not followed, and each file is listed once, at its own path."""
    put(tmp_path, "animals/cat/1.jpg")
    (tmp_path / "animals" / "cat" / "all").symlink_to(tmp_path)
    (tmp_path / "animals" / "cat" / "again").symlink_to(tmp_path / "animals")
    (tmp_path / "pets").symlink_to(tmp_path / "animals")

    assert paths_of(tmp_path) == ["animals/cat/1.jpg"]


def test_broken_link_is_ignored(tmp_path: Path) -> None:
    """A link whose target does not exist is not listed."""
    put(tmp_path, "cat/1.jpg")
    (tmp_path / "cat" / "2.jpg").symlink_to(tmp_path / "cat" / "gone.jpg")

    assert paths_of(tmp_path) == ["cat/1.jpg"]


def test_source_may_be_a_link_itself(tmp_path: Path) -> None:
    """A source that is a symbolic link is followed."""
    put(tmp_path / "real", "cat/1.jpg")
    (tmp_path / "link").symlink_to(tmp_path / "real")

    assert paths_of(tmp_path / "link") == ["cat/1.jpg"]


def test_listing_is_ordered_by_path(tmp_path: Path) -> None:
    """The order does not depend on the file system."""
    put(tmp_path, *(f"{label}/{number}.jpg" for label in ("b", "a", "c") for number in (3, 1, 2)))

    assert paths_of(tmp_path) == [f"{label}/{number}.jpg" for label in ("a", "b", "c") for number in (1, 2, 3)]


def test_missing_folder_is_refused(tmp_path: Path) -> None:
    """The message names the folder and the expected kind of source."""
    with pytest.raises(WrongInput, match=r"'.*/gone', which does not exist") as refused:
        list_images(tmp_path / "gone")
    assert refused.value.setting == "source"


def test_file_as_source_is_refused(tmp_path: Path) -> None:
    """A source that is a file is refused."""
    put(tmp_path, "1.jpg")

    with pytest.raises(WrongInput, match="which is not a folder: give a folder"):
        list_images(tmp_path / "1.jpg")


def test_folder_without_images_is_refused(tmp_path: Path) -> None:
    """The message names the extensions of image files."""
    put(tmp_path, "cat/notes.txt")

    with pytest.raises(WrongInput, match=r"holds no image") as refused:
        check_source(tmp_path)
    assert refused.value.setting == "source"


def test_one_class_is_refused(tmp_path: Path) -> None:
    """A source with a single class is refused, and the message names it."""
    put(tmp_path, "cat/1.jpg", "cat/2.jpg", "loose.jpg")

    with pytest.raises(WrongInput, match="only the class folder 'cat'") as refused:
        check_source(tmp_path)
    assert refused.value.setting == "source"


def test_images_without_class_folders_are_refused(tmp_path: Path) -> None:
    """A source with images only at the top has no labels, and is refused."""
    put(tmp_path, "1.jpg", "2.jpg")

    with pytest.raises(WrongInput, match="no class folder: a classifier needs at least two"):
        check_source(tmp_path)


def test_two_classes_are_enough(tmp_path: Path) -> None:
    """A source with two classes is accepted, and its listing is returned."""
    put(tmp_path, "cat/1.jpg", "dog/1.jpg", "dog/2.jpg")

    assert check_source(tmp_path).num_rows == 3


def test_name_that_is_not_valid_utf8_is_listed_escaped(tmp_path: Path) -> None:
    """A file name in another encoding does not fail the run; it is escaped, and the file will be unreadable."""
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "1.jpg").write_bytes(b"x")
    with open(bytes(tmp_path / "cat") + b"/\xe9t\xe9.jpg", "wb") as file:
        file.write(b"x")

    assert list_images(tmp_path).table()["path"].to_pylist() == ["cat/1.jpg", "cat/\\xe9t\\xe9.jpg"]


NOBODY = 65534
"""User id without any right of its own."""

GONE = ["ENOENT", "ENOTDIR", "ELOOP"]
UNKNOWN = ["EACCES", "EPERM", "ESTALE", "EIO", "ENOTCONN", "ETIMEDOUT", "ENAMETOOLONG"]


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """Yield a folder that every user may enter, unlike pytest's own; the test runs as a user without privileges."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture
def unprivileged() -> Iterator[Callable[[], None]]:
    """Return a function after whose call this process has no more rights than any user; they come back at the end."""
    user = os.geteuid()
    try:
        yield lambda: os.seteuid(NOBODY) if user == 0 else None
    finally:
        os.seteuid(user)


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that makes a call of `os` fail for paths with a name, after some calls that succeed."""

    def make(call: str, name: str, error: str, after: int = 0) -> None:
        original, number, passed = getattr(os, call), getattr(errno, error), [0]

        def failing(path, *given, **named):
            if isinstance(path, str | Path) and os.path.basename(path) == name:
                passed[0] += 1
                if passed[0] > after:
                    raise OSError(number, os.strerror(number), str(path))
            return original(path, *given, **named)

        monkeypatch.setattr(os, call, failing)

    return make


@pytest.mark.parametrize("mode", [0o644, 0o311, 0o000], ids=["no search", "no listing", "nothing"])
def test_folder_that_this_user_may_not_read_is_an_error(shared_folder: Path, unprivileged, mode: int) -> None:
    """Without permission to look at its files, a class does not count as deleted; the message names the path."""
    put(shared_folder, "cat/1.jpg", "dog/1.jpg")
    (shared_folder / "cat").chmod(mode)
    unprivileged()

    with pytest.raises(WrongInput, match=r"source has '.*/cat(/1\.jpg)?', which cannot be read \(Permission denied\)"):
        list_images(shared_folder)


def test_source_below_a_folder_that_this_user_may_not_enter_is_an_error(shared_folder: Path, unprivileged) -> None:
    """Neither "does not exist" nor a traceback: it may be there."""
    put(shared_folder, "closed/source/cat/1.jpg")
    (shared_folder / "closed").chmod(0o600)
    unprivileged()

    with pytest.raises(WrongInput, match=r"source has '.*/closed/source', which cannot be read \(Permission denied\)"):
        list_images(shared_folder / "closed" / "source")


def test_link_into_a_closed_folder_is_an_error_inside_the_source_only(shared_folder: Path, unprivileged) -> None:
    """A link that leads out of the source is not read anyway; a link that stays inside may be an image."""
    put(shared_folder, "source/cat/1.jpg", "source/cat/store/2.jpg", "closed/3.jpg")
    source = shared_folder / "source"
    (source / "cat" / "out.jpg").symlink_to(shared_folder / "closed" / "3.jpg")
    (shared_folder / "closed").chmod(0o000)
    unprivileged()
    assert paths_of(source) == ["cat/1.jpg", "cat/store/2.jpg"]
    os.seteuid(os.getuid())

    (source / "cat" / "in.jpg").symlink_to(source / ".store" / "2.jpg")
    (source / "cat" / "store").rename(source / ".store")
    (source / ".store").chmod(0o000)
    unprivileged()

    with pytest.raises(WrongInput, match=r"source has '.*/cat/in\.jpg', which cannot be read \(Permission denied\)"):
        list_images(source)


@pytest.mark.parametrize("error", UNKNOWN)
@pytest.mark.parametrize(
    ("call", "name", "after"),
    [
        ("stat", "2.jpg", 0),
        ("stat", "link.jpg", 0),
        ("lstat", "link.jpg", 0),
        ("readlink", "link.jpg", 0),
        ("scandir", "cat", 0),
        ("open", "cat", 0),
        ("stat", "source", 0),
        ("scandir", "source", 0),
        ("stat", "source", 1),
    ],
    ids=[
        "file",
        "link",
        "lstat",
        "readlink",
        "folder",
        "folder again",
        "root",
        "listing of the root",
        "root at the end",
    ],
)
def test_what_cannot_be_looked_at_is_not_gone(
    tmp_path: Path, fail: Callable[..., None], call: str, name: str, after: int, error: str
) -> None:
    """The error has the path and the reason, which is not an absence: with it, rows would leave the table."""
    source = tmp_path / "source"
    put(source, "cat/1.jpg", "cat/2.jpg", "dog/1.jpg")
    (source / "cat" / "link.jpg").symlink_to(source / "dog" / "1.jpg")
    fail(call, name, error, after)

    with pytest.raises(
        (SourceUnavailable, WrongInput), match=rf"source has '.*{name}', which cannot be read \("
    ) as found:
        list_images(source)

    assert os.strerror(getattr(errno, error)) in str(found.value)
    assert isinstance(found.value, WrongInput) is (error in {"EACCES", "EPERM"})


@pytest.mark.parametrize("error", GONE)
@pytest.mark.parametrize(
    ("call", "name", "left"),
    [
        ("stat", "2.jpg", ["cat/1.jpg", "cat/link.jpg", "dog/1.jpg"]),
        ("lstat", "link.jpg", ["cat/1.jpg", "cat/2.jpg", "dog/1.jpg"]),
        ("readlink", "link.jpg", ["cat/1.jpg", "cat/2.jpg", "dog/1.jpg"]),
        ("scandir", "cat", ["dog/1.jpg"]),
        ("open", "cat", ["dog/1.jpg"]),
    ],
)
def test_file_or_folder_that_vanished_is_not_listed(
    tmp_path: Path, fail: Callable[..., None], call: str, name: str, left: list[str], error: str
) -> None:
    """Files may be deleted while their source is listed."""
    source = tmp_path / "source"
    put(source, "cat/1.jpg", "cat/2.jpg", "dog/1.jpg")
    (source / "cat" / "link.jpg").symlink_to(source / "dog" / "1.jpg")
    fail(call, name, error)

    assert paths_of(source) == left


def test_folder_whose_names_cannot_be_read_to_the_end_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fails within a folder must not make the other half of its files look deleted."""
    put(tmp_path, "cat/1.jpg", "cat/2.jpg")
    scandir = os.scandir

    class Failing:
        def __init__(self, folder: str) -> None:
            self.entries = scandir(folder)

        def __enter__(self):
            return self

        def __exit__(self, *_error: object) -> None:
            self.entries.close()

        def __iter__(self):
            yield next(self.entries)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "scandir", lambda folder: (Failing if folder.endswith("cat") else scandir)(folder))

    with pytest.raises(SourceUnavailable, match=r"source has '.*/cat', which cannot be read \(Input/output error\)"):
        list_images(tmp_path)


@pytest.mark.parametrize("becomes", ["missing", "another folder"])
def test_source_that_is_unmounted_while_it_is_listed_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, becomes: str
) -> None:
    """There remains the empty folder below the mount, or none: the files that were not listed are not deleted."""
    source = tmp_path / "source"
    put(source, "cat/1.jpg", "dog/1.jpg")
    scandir = os.scandir

    def unmount(folder: str):
        if folder.endswith("dog"):
            source.rename(tmp_path / "elsewhere")
            if becomes == "another folder":
                source.mkdir()
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", unmount)

    with pytest.raises(SourceUnavailable, match=r"'.*/source', which was unmounted") as refused:
        list_images(source)
    assert refused.value.setting == "source"


def test_inode_of_64_bits_fits_into_the_ledger() -> None:
    """Network file systems use all bits, and tables have signed integers only."""
    files = ListedFiles(["cat/1.jpg"], [1], [1], [1], [2**64 - 2])

    listing = make_listing([files], "source", EtlConfig(), LeftOut()).table()

    assert listing["inode"].to_pylist() == [-2]
