"""Outcomes of files: every line of the table in tasks/etl/README.md, tested on Delta tables."""

import os
import re
import shutil
import struct
import zlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tasks.config.storage import SparkConfig, StorageConfig
from tasks.etl.ingest import ingest_source
from tasks.etl.source import prepare_source
from tasks.refs import EtlReport
from tasks.storage import Storage, resolve_storage
from tests.builders.colour_profiles import adobe_rgb
from tests.builders.etl_tables import etl_settings, ingest, ledger
from tests.builders.image_bytes import (
    deep_png,
    encoded,
    jpeg_with_frame,
    png_with_chunks,
    raw_photo,
    run_length_bmp,
    scan_bomb,
    tiff_with_tile,
)
from tests.builders.processes import ROOT
from tests.conftest import write_images

README = ROOT / "tasks" / "etl" / "README.md"


@dataclass(frozen=True)
class Line:
    """A line of the README's table: its first words, and outcome and reason of files below the source.

    The outcome None means that a file is not in the ledger.
    """

    begins: str
    outcome: str | None
    reason: str | None
    paths: tuple[str, ...]


LINES = (
    Line(
        "JPEG, PNG",
        "stored",
        None,
        tuple(
            f"train/red/{name}"
            for name in ("000.png", "jpeg-inside.png", "UPPER.JPG", "a.gif", "a.HEIC", "avif.txt", "plain", "x.png.1")
        ),
    ),
    Line(
        "grayscale",
        "stored",
        None,
        tuple(
            f"train/red/{name}" for name in ("gray.png", "palette.png", "cmyk.jpg", "deep.png", "clear.png", "pro.jpg")
        ),
    ),
    Line("EXIF rotation", "stored", None, ("train/red/turned.jpg", "train/red/animated.png")),
    Line("a name with unicode", "stored", None, ("train/größe 猫/a=b 50%.png", "train/blue/link.png")),
    Line("the same bytes twice under one label", "duplicate", None, ("train/green/zzz.png",)),
    Line(
        "the same bytes under two labels", "quarantined", "label_conflict", ("train/red/two.png", "train/blue/two.png")
    ),
    Line("the same bytes in two", "quarantined", "split_conflict", ("train/red/leak.png", "val/red/leak.png")),
    Line("empty", "quarantined", "zero_bytes", ("train/red/empty.png",)),
    Line("a profile", "stored", None, ("train/red/profile.png",)),
    Line("the name of an image", "quarantined", "not_an_image", ("train/red/text.jpg", "train/red/web.png")),
    Line("another format", "quarantined", "unsupported_format", ("train/red/xl.jpg", "train/red/twelve.jpg")),
    Line("cut off", "quarantined", "truncated", ("train/red/half.png", "train/red/header.png")),
    Line("damaged pixels", "quarantined", "damaged", ("train/red/damaged.png",)),
    Line("damaged texts", "stored", None, ("train/red/notes.png",)),
    Line("more than", "quarantined", "too_many_pixels", ("train/red/bomb.png",)),
    Line("a JPEG of more than 100 scans", "quarantined", "too_many_parts", ("train/red/scans.jpg",)),
    Line("a BMP with run lengths", "quarantined", "too_many_parts", ("train/red/runs.png", "train/red/tile.png")),
    Line("a side below", "quarantined", "too_small", ("train/red/pixel.png", "train/red/hairline.png")),
    Line("samples that", "quarantined", "unsupported_mode", ("train/red/float.png",)),
    Line("16-bit samples whose", "quarantined", "unknown_range", ("train/red/bits.png",)),
    Line("new, and no permission", "quarantined", "unreadable", ("train/red/\\xe9.png",)),
    Line("changed or touched, and no permission", "stored", None, ("train/blue/001.png",)),
    Line("no label", "quarantined", "label_missing", ("train/lone.png", "lone.png")),
    Line("in none of", "quarantined", "split_missing", ("red/nowhere.png",)),
    Line("neither the name nor", "ignored", "other_file", ("train/red/a.mov", "train/red/preview.nef", "notes.txt")),
    Line("hidden", None, None, ("train/red/.hidden.png", "train/red/._000.png", "train/red/Thumbs.db")),
    Line("in a system folder", None, None, ("train/@eaDir/000.png",)),
    Line("a link that leads out", None, None, ("train/red/out.png", "train/linked/000.png")),
    Line("changed since", "stored", None, ("train/green/001.png",)),
    Line("deleted since", "deleted", None, ("train/green/002.png",)),
)


def noise(seed: int, side: int = 12) -> Image.Image:
    """Return an image of random pixels that differs for each seed."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8))


def bomb(side: int) -> bytes:
    """Return a PNG file whose header declares too many pixels."""
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", b""), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


def make_source(folder: Path) -> None:
    """Write a source with every kind of file in the table, and enough valid images."""
    for number, split in enumerate(("train", "val", "test")):
        write_images(folder / split, per_class=3, first=10 * number)
    red = folder / "train" / "red"
    exif = Image.Exif()
    exif[0x0112] = 6
    whole, clear = encoded(noise(1, 64), "PNG"), noise(6)
    clear.putalpha(90)
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 0xFF
    contents = {
        "jpeg-inside.png": encoded(noise(2), "JPEG"),
        "UPPER.JPG": encoded(noise(3), "PNG"),
        "gray.png": encoded(noise(4).convert("L"), "PNG"),
        "palette.png": encoded(noise(5).convert("P"), "PNG"),
        "cmyk.jpg": encoded(noise(7).convert("CMYK"), "JPEG"),
        "deep.png": encoded(Image.fromarray(np.arange(144, dtype=np.uint16).reshape(12, 12) * 300), "PNG"),
        "clear.png": encoded(clear, "PNG"),
        "pro.jpg": encoded(noise(8), "JPEG", progressive=True),
        "turned.jpg": encoded(noise(9).resize((30, 20)), "JPEG", exif=exif),
        "animated.png": encoded(noise(10), "PNG", save_all=True, append_images=[noise(11)]),
        "two.png": encoded(noise(12), "PNG"),
        "leak.png": encoded(noise(13), "PNG"),
        "empty.png": b"",
        "text.jpg": b"no image",
        "web.png": b"<html></html>",
        "xl.jpg": b"\xff\x0a" + bytes(99),
        "twelve.jpg": jpeg_with_frame(0xC1, 12),
        "half.png": whole[: len(whole) // 2],
        "header.png": whole[:20],
        "notes.png": png_with_chunks(1, b"zTXt", b"a\0\0" + zlib.compress(bytes(2 << 20))),
        "damaged.png": bytes(damaged),
        "bomb.png": bomb(20_000),
        "scans.jpg": scan_bomb(noise(19), 200),
        "runs.png": run_length_bmp(2048, 2049),
        "tile.png": tiff_with_tile(16, 60_000),
        "pixel.png": encoded(Image.new("RGB", (1, 1)), "PNG"),
        "hairline.png": encoded(noise(14).resize((50, 1)), "PNG"),
        "bits.png": deep_png(np.arange(144, dtype=np.uint16).reshape(12, 12, 1)),
        "float.png": encoded(Image.new("F", (9, 9), 0.5), "TIFF"),
        "a.HEIC": encoded(noise(24), "HEIC"),
        "avif.txt": encoded(noise(25), "AVIF"),
        "plain": encoded(noise(26), "JPEG2000"),
        "x.png.1": encoded(noise(27), "WEBP"),
        "profile.png": encoded(noise(28), "PNG", icc_profile=adobe_rgb()),
        "a.mov": b"\0\0\0\x14ftypqt  \0\0\0\0qt  ",
        "preview.nef": raw_photo((254, 1)),
        "Thumbs.db": b"\xd0\xcf\x11\xe0",
        ".hidden.png": whole,
        "._000.png": whole,
        "a.gif": encoded(noise(15), "GIF"),
    }
    for name, content in contents.items():
        (red / name).write_bytes(content)
    with open(os.fsencode(red) + b"/\xe9.png", "wb") as file:
        file.write(whole)
    odd = folder / "train" / "größe 猫"
    odd.mkdir()
    noise(16).save(odd / "a=b 50%.png")
    # A link to a listed image of its label would be a duplicate: this one is the only listed path of its image.
    (folder / "train" / ".store").mkdir()
    noise(17).save(folder / "train" / ".store" / "linked.png")
    (folder / "train" / "blue" / "link.png").symlink_to(folder / "train" / ".store" / "linked.png")
    noise(18).save(folder.parent / "outside.png")
    (red / "out.png").symlink_to(folder.parent / "outside.png")
    (folder / "train" / "linked").symlink_to(folder / "train" / "green")
    (folder / "notes.txt").write_text("where the photos are from")
    shutil.copy(folder / "train" / "green" / "000.png", folder / "train" / "green" / "zzz.png")
    shutil.copy(red / "two.png", folder / "train" / "blue" / "two.png")
    shutil.copy(red / "leak.png", folder / "val" / "red" / "leak.png")
    for number, path in enumerate(("train/lone.png", "lone.png", "red/nowhere.png", "train/@eaDir/000.png")):
        (folder / path).parent.mkdir(exist_ok=True)
        noise(20 + number).save(folder / path)


@dataclass(frozen=True)
class Ingested:
    """A source with every kind of file, after two ETL runs."""

    source: Path
    storage: Storage
    files: dict[str, tuple[str, str | None]]
    first: EtlReport
    second: EtlReport


@pytest.fixture(scope="module")
def ingested(spark, tmp_path_factory) -> Ingested:
    """Ingest the source, change two files, delete another, and ingest again; one of the two cannot be read then."""
    folder = tmp_path_factory.mktemp("files")
    source, storage = folder / "source", resolve_storage(StorageConfig(home=str(folder / "home")))
    make_source(source)
    settings = {"split_by": "folder", "max_bad_fraction": 1.0, "stored_side": 32}
    first = ingest(source, storage, **settings)
    assert first.changed
    noise(30).save(source / "train" / "green" / "001.png")
    (source / "train" / "green" / "002.png").unlink()
    unreadable, etl = source / "train" / "blue" / "001.png", etl_settings(source, **settings)
    os.utime(unreadable)
    listed = prepare_source(etl, storage, SparkConfig())
    unreadable.unlink()
    unreadable.mkdir()  # Reading it fails (EISDIR), also for root.
    second = ingest_source(etl, listed, storage, SparkConfig())
    return Ingested(source, storage, ledger(spark, storage), first, second)


def readme_lines() -> list[str]:
    """Return the first column of the README's table."""
    table = README.read_text().split("## What happens to a file\n\n")[1].split("\n\n")[0]
    return [re.split(r" \| ", line.removeprefix("| "))[0] for line in table.splitlines()[2:]]


def test_every_line_of_the_readme_is_tested() -> None:
    """The lines here are those of the README, in the same order."""
    lines = readme_lines()
    assert len(lines) == len(LINES)
    assert [line for line, tested in zip(lines, LINES, strict=True) if not line.startswith(tested.begins)] == []


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.begins)
def test_file_has_the_outcome_in_the_readme(ingested: Ingested, line: Line) -> None:
    """Every file of this kind has the outcome and reason of the line."""
    wanted = None if line.outcome is None else (line.outcome, line.reason)
    assert {path: ingested.files.get(path) for path in line.paths} == dict.fromkeys(line.paths, wanted)


def test_all_files_are_accounted_for(ingested: Ingested) -> None:
    """The numbers of both reports add up to those of the ledger, and to what lies in the folder."""
    outcomes = Counter(outcome for outcome, _reason in ingested.files.values())
    second = ingested.second
    assert outcomes == {
        "stored": second.stored,
        "duplicate": second.duplicates,
        "quarantined": second.quarantined,
        "ignored": second.ignored,
        "deleted": 1,
    }
    assert ingested.first.ignored == second.ignored == 3
    found = [path for path in ingested.source.rglob("*") if path.is_file() and not path.is_symlink()]
    # Files but those of folders that count as one, the link that is followed, and a file that became a folder.
    in_folders = [path for path in found if {".store", "@eaDir"} & {*path.parts}]
    accounted = second.stored + second.duplicates + second.quarantined + second.ignored + second.left_by_systems
    assert accounted == len(found) - len(in_folders) + len((".store", "@eaDir")) + len(("link", "001.png"))


def test_all_other_files_in_the_ledger_are_stored(ingested: Ingested) -> None:
    """The other files are plain images."""
    named = {path for line in LINES for path in line.paths}
    others = {path: found for path, found in ingested.files.items() if path not in named}
    assert set(others.values()) == {("stored", None)}


def test_stored_images_are_upright_and_within_stored_side(spark, ingested: Ingested) -> None:
    """Width and height of a rotated image are those after the EXIF rotation, and all images have a hash."""
    images = spark.read.format("delta").load(ingested.storage.table("images")).drop("content")
    files = spark.read.format("delta").load(ingested.storage.table("files")).select("sha256", "path")
    rows = {row["path"]: row for row in images.join(files, on="sha256", how="inner").collect()}
    turned = rows["train/red/turned.jpg"]
    assert (turned["width"], turned["height"]) == (20, 30)
    assert rows["train/red/000.png"]["split"] == "train"
    assert all(row["dhash"] is not None for row in rows.values())
