"""Test accuracy of a linear probe of the frozen backbone, as a reference for a trained head.

The probe is a logistic regression on the features of every image. Images have our letterbox, or torchvision's own
preprocessing of these weights (shorter side to 256 pixels, centre crop of 224). Run by tests/benchmarks/accuracy.py as
`linear_probe.py PHOTOS WEIGHTS letterbox|crop`, in the environment of a rank; prints the accuracy on the split `test`.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch
import torchvision
from PIL import Image
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torchvision.transforms._presets import ImageClassification

from tasks.model_package.decode import decode_pixels
from tasks.model_package.network import normalize
from tests.benchmarks.train_data import SIDE, split_of

BATCH = 64

Prepare = Callable[[Path], torch.Tensor]
"""A function from a file to the input of the network, float32 (3, SIDE, SIDE)."""


def letterboxed(file: Path) -> torch.Tensor:
    """Return an image as in our cache, with the normalisation of the weights."""
    return normalize(torch.from_numpy(decode_pixels(file.read_bytes(), SIDE).copy())[None])[0]


def cropped(file: Path) -> torch.Tensor:
    """Return an image with torchvision's own preprocessing."""
    with Image.open(file) as image:
        prepared: torch.Tensor = ImageClassification(crop_size=SIDE)(image.convert("RGB"))
    return prepared


def features_of(files: list[Path], backbone: torch.nn.Module, prepare: Prepare) -> Any:
    """Return the backbone's features, float32 (N, F)."""
    with torch.inference_mode():
        batches = [
            backbone(torch.stack([prepare(file) for file in files[begin : begin + BATCH]]))
            for begin in range(0, len(files), BATCH)
        ]
    return torch.cat(batches).numpy()


def probe(photos: Path, weights: Path, prepare: Prepare) -> float:
    """Return the accuracy on the split `test` of a probe that is fitted on the split `train`."""
    backbone = torchvision.models.mobilenet_v2(weights=None)
    backbone.load_state_dict(torch.load(weights, weights_only=True))
    backbone.classifier = torch.nn.Identity()
    backbone.eval()
    rows: dict[str, tuple[list[Path], list[int]]] = {"train": ([], []), "test": ([], [])}
    for label, folder in enumerate(sorted(path for path in photos.iterdir() if path.is_dir())):
        for file in sorted(folder.iterdir()):
            if (split := split_of(file.read_bytes())) in rows:
                rows[split][0].append(file)
                rows[split][1].append(label)
    model = make_pipeline(StandardScaler(), LogisticRegression(C=0.01, max_iter=1000))
    model.fit(features_of(rows["train"][0], backbone, prepare), rows["train"][1])
    return float(model.score(features_of(rows["test"][0], backbone, prepare), rows["test"][1]))


if __name__ == "__main__":
    print(probe(Path(sys.argv[1]), Path(sys.argv[2]), letterboxed if sys.argv[3] == "letterbox" else cropped))
