"""Tests of figures as data URIs: unchanged if they fit, else scaled down."""

import base64
import io

import torch
from matplotlib.figure import Figure
from PIL import Image

from tasks.metrics.mistakes import NUM_MISTAKES, Mistake
from tasks.report.figures import draw_learning_curves, draw_mistakes
from tasks.report.page import fit_images, shrink
from tests.builders.finished_training import history_of

MAX_BYTES = 200_000


def png_of(figure: Figure) -> bytes:
    """Return the figure as a PNG file, as MLflow stores it."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def noisy_gallery() -> bytes:
    """Return a full gallery of noise images, which compress badly."""
    generator = torch.Generator().manual_seed(1)
    images_NHWC = torch.randint(0, 256, (NUM_MISTAKES, 224, 224, 3), dtype=torch.uint8, generator=generator)
    mistakes = [Mistake(row, row % 3, (row + 1) % 3, 0.9, 0.05, 3.0) for row in range(NUM_MISTAKES)]
    names = [f"ant/{row}.jpg" for row in range(NUM_MISTAKES)]
    return png_of(draw_mistakes(images_NHWC, mistakes, names, ("ant", "bee", "cat")))


def test_large_figure_is_scaled_down_and_small_ones_are_unchanged() -> None:
    """The order is kept, and the large figure gets the space that small ones do not need."""
    curves, gallery = png_of(draw_learning_curves(history_of(5), 3)), noisy_gallery()
    assert len(curves) < MAX_BYTES / 3 < 5 * MAX_BYTES < len(gallery)

    found = fit_images({"gallery": gallery, "curves": curves, "none": b"\x89PNG" + bytes(MAX_BYTES)}, MAX_BYTES)

    assert list(found) == ["gallery", "curves"]
    kinds = {name: uri.partition(",")[0] for name, uri in found.items()}
    assert kinds == {"gallery": "data:image/jpeg;base64", "curves": "data:image/png;base64"}
    contents = {name: base64.b64decode(uri.partition(",")[2]) for name, uri in found.items()}
    assert contents["curves"] == curves
    assert sum(map(len, contents.values())) <= MAX_BYTES
    with Image.open(io.BytesIO(contents["gallery"])) as small, Image.open(io.BytesIO(gallery)) as whole:
        small.load()
        assert small.format == "JPEG"
        assert 480 <= small.width < whole.width
        assert abs(small.height / small.width - whole.height / whole.width) < 0.01


def test_image_keeps_the_greatest_width_that_fits() -> None:
    """The result is None if no JPEG version fits."""
    gallery = noisy_gallery()
    widths = []
    for max_bytes in (1_000_000, 100_000, 50_000):
        content = shrink(gallery, max_bytes)
        assert content is not None
        assert len(content) <= max_bytes
        with Image.open(io.BytesIO(content)) as small:
            widths.append(small.width)

    with Image.open(io.BytesIO(gallery)) as whole:
        assert widths[0] == whole.width
    assert widths == sorted(widths, reverse=True)
    assert shrink(gallery, 500) is None
