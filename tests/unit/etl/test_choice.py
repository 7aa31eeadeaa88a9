"""Files that are chosen by their content, and what a listing leaves out and says."""

import os
import struct
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.config.etl import EtlConfig
from tasks.errors import WrongInput
from tasks.etl import choice
from tasks.etl.choice import LeftOut, content_of_head
from tasks.etl.listing import check_source, local_files, make_listing
from tasks.model_package.structure import HEAD_BYTES, NO_IMAGE, other_content
from tests.builders.image_bytes import encoded, noise, raw_photo

IMAGES = {
    name: encoded(noise(16, 16), name)
    for name in ("JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF", "AVIF", "JPEG2000", "HEIC", "MPO")
}

MOVIE = b"\0\0\0\x14ftypqt  \0\0\0\0qt  " + bytes(100)


OTHERS = {
    "movie.mov": (MOVIE, NO_IMAGE),
    "x.aae": (b"<?xml version='1.0'?><plist/>", NO_IMAGE),
    "notes.txt": (b"BMW drives\nby the sea, often", NO_IMAGE),
    "nothing": (b"", "an empty file without the name of an image"),
    "paper.pdf": (b"%PDF-1.7\n", "PDF, which is not decoded"),
    "logo.svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "SVG, which is not decoded"),
    "a.nef": (raw_photo((254, 1), (256, 160)), "a camera's raw photo, which is not decoded"),
    "b.dng": (raw_photo((254, 0), (50706, 4)), "a camera's raw photo, which is not decoded"),
    "c.cr2": (raw_photo((256, 160), begin=b"CR\x02\0"), "a camera's raw photo, which is not decoded"),
}


def put(folder: Path, path: str, content: bytes) -> Path:
    """Write a file below a folder, and return it."""
    file = folder / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    return file


def listed(source: Path, **settings: object) -> tuple[dict[str, str | None], LeftOut]:
    """Return path and label of the listed images, and what was left out."""
    left = LeftOut()
    rows = make_listing(local_files(source, left=left), str(source), EtlConfig.model_validate(settings), left).table()
    return dict(zip(rows["path"].to_pylist(), rows["label"].to_pylist(), strict=True)), left


@pytest.mark.parametrize("name", IMAGES)
def test_image_is_chosen_by_its_first_bytes(name: str) -> None:
    """The first kilobytes are enough, whatever the file is called."""
    assert other_content(IMAGES[name][:HEAD_BYTES]) is None


@pytest.mark.parametrize("name", OTHERS)
def test_file_without_an_image_has_a_reason(name: str) -> None:
    """Movies, texts, and formats that are not decoded; of raw photos, the first image is a small preview."""
    content, reason = OTHERS[name]

    assert other_content(content) == reason


def test_tiff_whose_directory_is_at_its_end_is_an_image() -> None:
    """It cannot be seen from the first bytes that it would be a raw photo."""
    assert other_content(b"II*\0" + struct.pack("<I", 1 << 20) + bytes(HEAD_BYTES)) is None


def test_files_are_chosen_whatever_they_are_called(tmp_path: Path) -> None:
    """Without an extension, with another one, with a suffix of a copy or a query, and with a space at the end."""
    names = ["no extension", "x.png.1", "x.png?raw=true", "x.png ", "x.txt", "x.jfif", "x.JPE", "x.HEIC", "x.thumb"]
    for name, content in zip(names, IMAGES.values(), strict=False):
        put(tmp_path, f"cat/{name}", content)
    for name, (content, _reason) in OTHERS.items():
        put(tmp_path, f"dog/{name}", content)
    put(tmp_path, "dog/1.jpg", b"chosen by its name, and quarantined")

    found, left = listed(tmp_path)

    assert found == {f"cat/{name}": "cat" for name in names} | {"dog/1.jpg": "dog"}
    assert left.num_ignored == len(OTHERS)
    assert left.kinds == {os.path.splitext(name)[1] or "without an extension": 1 for name in OTHERS}


def test_ignored_files_have_a_row_with_their_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Path, size, times and inode as those of images, in temporary files of a bounded number of rows."""
    monkeypatch.setattr(choice, "GROUP_FILES", 4)
    for name, (content, _reason) in OTHERS.items():
        put(tmp_path, f"dog/{name}", content)
    put(tmp_path, "dog/1.jpg", b"x")
    _found, left = listed(tmp_path)

    rows = left.rows()

    assert len(rows.files) == 3
    table = pa.concat_tables([pq.read_table(file) for file in rows.files])
    assert dict(zip(table["path"].to_pylist(), table["detail"].to_pylist(), strict=True)) == {
        f"dog/{name}": reason for name, (_content, reason) in OTHERS.items()
    }
    status = (tmp_path / "dog/movie.mov").stat()
    (row,) = [row for row in table.to_pylist() if row["path"] == "dog/movie.mov"]
    assert (row["size"], row["inode"]) == (status.st_size, status.st_ino)


def test_what_systems_leave_is_one_number(tmp_path: Path) -> None:
    """Hidden files and folders, and those of Windows and macOS; a folder counts as one."""
    put(tmp_path, "cat/1.jpg", b"x")
    for path in ("cat/Thumbs.db", "cat/desktop.ini", "cat/Icon\r", ".DS_Store", "cat/._1.jpg", ".git/a", ".git/b"):
        put(tmp_path, path, b"x")
    for path in ("__MACOSX/cat/._1.jpg", "__MACOSX/cat/._2.jpg"):
        put(tmp_path, path, b"x")

    found, left = listed(tmp_path)

    assert (list(found), left.num_ignored, left.num_systems) == (["cat/1.jpg"], 0, 7)
    assert left.parts == "0 ignored + 7 left by systems"


def test_links_that_are_not_followed_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Files outside of the source, and class folders that are a link, wherever that leads."""
    source = tmp_path / "source"
    put(source, "cat/1.jpg", b"x")
    put(tmp_path, "outside/2.jpg", b"x")
    (source / "cat" / "2.jpg").symlink_to(tmp_path / "outside" / "2.jpg")
    (source / "dog").symlink_to(tmp_path / "outside")
    (source / "lion").symlink_to(source / "cat")
    (source / "cat" / "gone.jpg").symlink_to(tmp_path / "gone")

    found, left = listed(source)

    assert list(found) == ["cat/1.jpg"]
    assert (left.num_links, left.links) == (3, ["cat/2.jpg", "dog", "lion"])
    (message,) = [text for text in caplog.messages if text.startswith(f"3 links in '{source}' are not followed")]
    assert message.endswith(
        ", since they lead out of it or to a folder: 'cat/2.jpg', 'dog', 'lion'; put the files there"
    )


def test_source_of_links_alone_is_refused_with_their_number(tmp_path: Path) -> None:
    """Otherwise it would look like an empty folder."""
    put(tmp_path, "outside/2.jpg", b"x")
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "dog").symlink_to(tmp_path / "outside")
    put(tmp_path, "source/cat/a.mov", MOVIE)

    with pytest.raises(
        WrongInput,
        match=r"which holds no image: its 1 files are others \(1 \.mov\), and 1 links are not followed: check the path",
    ):
        check_source(tmp_path / "source")


def test_class_folder_without_an_image_is_a_warning_with_its_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of other files alone, or empty; not where the class has images elsewhere, or where labels are not folders."""
    for path in ("cat/1.jpg", "dog/1.jpg", "more/cat/2.jpg"):
        put(tmp_path, path, b"x")
    put(tmp_path, "movies/a.mov", MOVIE)
    put(tmp_path, "cat/a.mov", MOVIE)
    (tmp_path / "empty").mkdir()
    (tmp_path / "more" / "dog").mkdir()
    expected = f"2 class folders in '{tmp_path}' have no image: 'empty', 'movies'"

    listed(tmp_path)
    assert expected in caplog.messages
    caplog.clear()
    listed(tmp_path, labels={"by": "pattern", "pattern": "(cat|dog)"})
    assert "class folders" not in "".join(caplog.messages)


def test_folder_above_class_folders_has_images(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A list of labels beside class folders, and a text in a folder of a split, make neither a class folder."""
    for path in ("train/cat/1.jpg", "train/dog/1.jpg", "test/cat/1.jpg", "test/dog/2.jpg"):
        put(tmp_path, path, b"x")
    put(tmp_path, "train/labels.txt", b"x")
    put(tmp_path, "test/README.txt", b"x")

    for split_by in ("stratified", "folder"):
        listed(tmp_path, split_by=split_by)
        assert "class folders" not in "".join(caplog.messages)


def test_warning_about_a_link_is_said_once_by_a_stream(caplog: pytest.LogCaptureFixture) -> None:
    """It lists its source again and again; a new link is said, with the number of all."""
    said: set[str] = set()
    for links in (["a"], ["a"], ["a", "b"]):
        left = LeftOut()
        for link in links:
            left.skip_link(link)
        left.warn_of_links("source", said)

    assert [message.split(" links in ")[0] for message in caplog.messages] == ["1", "2"]
    assert [message.split(" to a folder: ")[1] for message in caplog.messages] == [
        "'a'; put the files there",
        "'b' and 1 more; put the files there",
    ]


def test_link_to_a_name_that_no_file_can_have_is_left_out(tmp_path: Path) -> None:
    """Neither that nor a mount that does not answer ends the run, where a link leads out of the source."""
    source = tmp_path / "source"
    put(source, "cat/1.jpg", b"x")
    (source / "cat" / "long").symlink_to("n" * 300)
    (source / "cat" / "outside").symlink_to(tmp_path / ("n" * 300))

    assert list(listed(source)[0]) == ["cat/1.jpg"]


def test_numbers_of_a_hostile_source_are_bounded_and_printable(tmp_path: Path) -> None:
    """Extensions that count up are others, and control characters do not reach the log."""
    left = LeftOut(keeps_rows=False)
    for number in range(300):
        left.ignore(NO_IMAGE, f"cat/frame.{number:07d}", 1, 1, None, None)
        left.ignore(NO_IMAGE, f"cat/frame.0000000{number}", 1, 1, None, None)
    left.ignore(NO_IMAGE, "cat/a.\x1b[31m\n", 1, 1, None, None)

    assert len(left.kinds) <= choice.MOST_KINDS + 1
    assert left.num_ignored == sum(left.kinds.values()) == 601
    assert left.kinds["others"] >= 300
    left.kinds = left.kinds.__class__({".\x1b[31m\n": 1})
    assert left.parts.isprintable()
    assert left.rows().files == ()


def test_unfinished_file_is_ignored_for_its_name(tmp_path: Path) -> None:
    """A download that still runs would be a truncated image, and an image twice when it is complete."""
    for name in ("1.jpg.crdownload", "2.png.part", "3.TMP"):
        put(tmp_path, f"cat/{name}", IMAGES["PNG"])
    put(tmp_path, "cat/4.png~", IMAGES["PNG"])

    found, left = listed(tmp_path)

    assert (list(found), left.num_ignored) == (["cat/4.png~"], 3)


def test_file_that_cannot_be_read_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be an image of the table, which would count as deleted."""
    put(tmp_path, "cat/unnamed", IMAGES["PNG"])
    folder = os.open(tmp_path / "cat", os.O_RDONLY)
    real = os.open

    def refused(path: str, flags: int, *more: int, dir_fd: int | None = None) -> int:
        if path == "unnamed":
            raise PermissionError(13, "Permission denied")
        return real(path, flags, *more, dir_fd=dir_fd)

    try:
        monkeypatch.setattr(os, "open", refused)
        assert content_of_head("unnamed", folder) is None
        assert list(listed(tmp_path)[0]) == ["cat/unnamed"]
    finally:
        monkeypatch.undo()
        os.close(folder)


@pytest.mark.parametrize("name", ["photos.zip", "photos.tar", "photos.tar.gz", "photos.TGZ", "photos.7z"])
def test_archive_as_source_has_a_way_out(tmp_path: Path, name: str) -> None:
    """It is unpacked by the user."""
    put(tmp_path, name, b"PK")

    with pytest.raises(WrongInput, match="which is an archive: unpack it, and give a folder of class folders"):
        check_source(tmp_path / name)
