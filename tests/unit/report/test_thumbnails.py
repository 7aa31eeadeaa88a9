"""Figures in a text: whole where there is room, smaller where there is not."""

import base64
import io

import torch
from matplotlib.figure import Figure
from PIL import Image

from tasks.metrics.mistakes import NUM_MISTAKES, Mistake
from tasks.report.figures import draw_learning_curves, draw_mistakes
from tasks.report.thumbnails import fit_images, shrink
from tests.builders.finished_training import history_of

MOST_BYTES = 200_000


def png_of(figure: Figure) -> bytes:
    """Return the figure as MLflow keeps it."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def noisy_gallery() -> bytes:
    """Return a full gallery of images of which no two pixels are alike."""
    generator = torch.Generator().manual_seed(1)
    images_NHWC = torch.randint(0, 256, (NUM_MISTAKES, 224, 224, 3), dtype=torch.uint8, generator=generator)
    mistakes = [Mistake(row, row % 3, (row + 1) % 3, 0.9, 0.05, 3.0) for row in range(NUM_MISTAKES)]
    names = [f"ant/{row}.jpg" for row in range(NUM_MISTAKES)]
    return png_of(draw_mistakes(images_NHWC, mistakes, names, ("ant", "bee", "cat")))


def test_a_gallery_becomes_small_beside_figures_that_stay_as_they_are() -> None:
    """In the order given; what the small ones do not need is the gallery's."""
    curves, gallery = png_of(draw_learning_curves(history_of(5), 3)), noisy_gallery()
    assert len(curves) < MOST_BYTES / 3 < 5 * MOST_BYTES < len(gallery)

    found = fit_images({"gallery": gallery, "curves": curves, "none": b"\x89PNG" + bytes(MOST_BYTES)}, MOST_BYTES)

    assert list(found) == ["gallery", "curves"]
    kinds = {name: uri.partition(",")[0] for name, uri in found.items()}
    assert kinds == {"gallery": "data:image/jpeg;base64", "curves": "data:image/png;base64"}
    contents = {name: base64.b64decode(uri.partition(",")[2]) for name, uri in found.items()}
    assert contents["curves"] == curves
    assert sum(map(len, contents.values())) <= MOST_BYTES
    with Image.open(io.BytesIO(contents["gallery"])) as small, Image.open(io.BytesIO(gallery)) as whole:
        small.load()
        assert small.format == "JPEG"
        assert 480 <= small.width < whole.width
        assert abs(small.height / small.width - whole.height / whole.width) < 0.01


def test_a_image_stays_as_wide_as_there_is_room_for() -> None:
    """And is left out where no rendition fits."""
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
