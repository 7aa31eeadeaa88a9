"""A folder of images in no particular layout: odd names, links, copies, and broken files of every kind."""

import os
from pathlib import Path

from tasks.etl.extract import MAX_FILE_BYTES
from tests.builders.image_bytes import encoded, noise, png_header_only, scan_bomb

GOOD = {
    "a.png": encoded(noise(24, 24, seed=1)),
    "deep/er/größe 猫/a=b 50%.png": encoded(noise(24, 24, seed=2)),
    "deep/er/x:y#c+%20.JPG": encoded(noise(40, 30, seed=3), "JPEG"),
    "deep/_under.jpeg": encoded(noise(30, 40, seed=4), "JPEG"),
    "copies/one.png": encoded(noise(24, 24, seed=1)),
    "copies/'; two.png": encoded(noise(24, 24, seed=1)),
}
BROKEN = {
    "bad/empty.jpg": (b"", "zero_bytes: "),
    "bad/cut.png": (encoded(noise(60, 60, seed=5))[:-800], "truncated: "),
    "bad/text.png": (b"no image", "not_an_image: "),
    "bad/bomb.png": (png_header_only(50_000, 50_000), "too_many_pixels: "),
    "bad/scans.jpg": (scan_bomb(noise(64, 64), 91), "too_many_parts: "),
}

UNREADABLE = {"bad/huge.jpg", r"bytes \xff.png"}
PATHS = GOOD.keys() | BROKEN.keys() | UNREADABLE | {"link in.png"}


def write_folder(tmp_path: Path) -> Path:
    """Write the folder, and a file beside it to which a link leads; return it."""
    source = tmp_path / "my photos=50%"
    for path, content in (GOOD | {path: content for path, (content, _) in BROKEN.items()}).items():
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).write_bytes(content)
    with (source / "bad" / "huge.jpg").open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    (tmp_path / "outside.png").write_bytes(GOOD["a.png"])
    (source / "link out.png").symlink_to(tmp_path / "outside.png")
    (source / "link in.png").symlink_to(source / "a.png")
    (source / ".hidden.png").write_bytes(GOOD["a.png"])
    (source / "notes.txt").write_text("no image")
    with open(os.fsencode(source) + b"/bytes \xff.png", "wb") as file:
        file.write(GOOD["a.png"])
    return source
