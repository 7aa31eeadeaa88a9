"""The built-in data set: the handwritten digits of scikit-learn, as image files in class folders."""

import os
from pathlib import Path

import numpy as np
from PIL import Image

NUM_DIGITS = 1797


def write_digits(folder: Path) -> None:
    """Write 1,797 grayscale PNG files of 8x8 pixels into ten class folders; existing files are not touched.

    The digits are those of Alpaydin and Kaynak (UCI, 1998) in scikit-learn's copy, levels 0-16 scaled to 0-255.
    """
    if sum(1 for _ in folder.glob("*/*.png")) == NUM_DIGITS:
        return
    from sklearn.datasets import load_digits

    digits = load_digits()
    for number, (levels, target) in enumerate(zip(digits.images, digits.target, strict=True)):
        file = folder / str(target) / f"{number:04d}.png"
        if file.exists():
            continue
        file.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.rint(levels * (255 / 16)).astype(np.uint8)
        # Written under another name and renamed: a killed run leaves no truncated file that would be quarantined.
        partial = file.with_suffix(".partial")
        Image.fromarray(pixels).save(partial, format="PNG")
        os.replace(partial, file)
