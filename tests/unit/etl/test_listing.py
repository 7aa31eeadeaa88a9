"""Listing of the image files of a source, and checks of the source."""

from pathlib import Path

import pytest

from tasks.errors import WrongInput
from tasks.etl.listing import check_source, is_image_path, list_images
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
    """A listing has path, label, size in bytes and modification time of each file."""
    put(tmp_path, "cat/1.jpg", "dog/2.png")

    listing = list_images(tmp_path).table()

    assert listing.schema == LISTING_ARROW
    assert listing["path"].to_pylist() == ["cat/1.jpg", "dog/2.png"]
    assert listing["label"].to_pylist() == ["cat", "dog"]
    assert listing["size"].to_pylist() == [7, 7]
    modified = listing["modified_at"].cast("int64").to_pylist()
    assert modified[0] == (tmp_path / "cat/1.jpg").stat().st_mtime_ns // 1000


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
    """Extensions are case-insensitive, and files with other extensions are ignored."""
    put(tmp_path, "cat/a.JPG", "cat/b.Jpeg", "cat/c.PNG", "cat/notes.txt", "cat/d.jpg.bak", "cat/jpg", "cat/e.gif")

    assert paths_of(tmp_path) == ["cat/a.JPG", "cat/b.Jpeg", "cat/c.PNG"]


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
    with pytest.raises(WrongInput, match=r"'.*/gone', which does not exist: give a folder of class folders"):
        list_images(tmp_path / "gone")


def test_file_as_source_is_refused(tmp_path: Path) -> None:
    """A source that is a file is refused."""
    put(tmp_path, "1.jpg")

    with pytest.raises(WrongInput, match="which is not a folder: give a folder"):
        list_images(tmp_path / "1.jpg")


def test_folder_without_images_is_refused(tmp_path: Path) -> None:
    """The message names the extensions of image files."""
    put(tmp_path, "cat/notes.txt")

    with pytest.raises(WrongInput, match=r"holds no \.jpeg, \.jpg, \.png file: check the path"):
        check_source(tmp_path)


def test_one_class_is_refused(tmp_path: Path) -> None:
    """A source with a single class is refused, and the message names it."""
    put(tmp_path, "cat/1.jpg", "cat/2.jpg", "loose.jpg")

    with pytest.raises(WrongInput, match="only the class folder 'cat': a classifier needs at least two"):
        check_source(tmp_path)


def test_images_without_class_folders_are_refused(tmp_path: Path) -> None:
    """A source with images only at the top has no labels, and is refused."""
    put(tmp_path, "1.jpg", "2.jpg")

    with pytest.raises(WrongInput, match="no class folder: a classifier needs at least two"):
        check_source(tmp_path)


def test_two_classes_are_enough(tmp_path: Path) -> None:
    """A source with two classes is accepted, and its listing is returned."""
    put(tmp_path, "cat/1.jpg", "dog/1.jpg", "dog/2.jpg")

    assert check_source(tmp_path).num_rows == 3


@pytest.mark.parametrize(
    ("path", "listed"),
    [
        ("cat/1.jpg", True),
        ("cat/_1.PNG", True),
        ("_cat/a=b.jpeg", True),
        ("cat/.1.jpg", False),
        ("cat/._1.jpg", False),
        (".thumbnails/cat/1.jpg", False),
        ("cat/notes.txt", False),
        ("cat/jpg", False),
    ],
)
def test_paths_on_an_object_store_are_filtered_like_local_files(path: str, listed: bool) -> None:
    """A store's flat listing ignores the same names as the walk of a folder."""
    assert is_image_path(path) is listed


def test_name_that_is_not_valid_utf8_is_listed_escaped(tmp_path: Path) -> None:
    """A file name in another encoding does not fail the run; it is escaped, and the file will be unreadable."""
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "1.jpg").write_bytes(b"x")
    with open(bytes(tmp_path / "cat") + b"/\xe9t\xe9.jpg", "wb") as file:
        file.write(b"x")

    assert list_images(tmp_path).table()["path"].to_pylist() == ["cat/1.jpg", "cat/\\xe9t\\xe9.jpg"]
