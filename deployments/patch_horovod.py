"""Patch Horovod's sources: C++17, and a check for stalled ranks that works over Gloo: patch_horovod.py FOLDER."""

import sys
from pathlib import Path

CXX_14, CXX_17 = "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 17)"

PATCHES = (
    # torch >= 2.1 does not compile as C++14 (horovod#3998).
    ("CMakeLists.txt", CXX_14, CXX_17),
    ("horovod/torch/CMakeLists.txt", CXX_14, CXX_17),
    # Reserved only, the vector is empty: the check for stalled ranks reads its size, and finds no rank.
    ("horovod/common/gloo/gloo_controller.cc", "global_ranks_.reserve(size_);", "global_ranks_.resize(size_);"),
)
"""File, text to replace, and its replacement. After a change, increment `patch` in build_horovod.sh."""


def patch(folder: Path) -> None:
    """Patch the unpacked sources in a folder.

    Raises:
        SystemExit: A file does not have the text that is replaced.
    """
    for name, old, new in PATCHES:
        file = folder / name
        text = file.read_text() if file.is_file() else ""
        if old not in text:
            raise SystemExit(
                f"patch_horovod: '{name}' does not have '{old}': adapt PATCHES in deployments/patch_horovod.py to this "
                "version of Horovod"
            )
        file.write_text(text.replace(old, new))


if __name__ == "__main__":
    patch(Path(sys.argv[1]))
