"""A peer of quality.py on folders SPLIT/CLASS, as a script that prints accuracy and seconds.

`quality_peers.py probe|fastai-EPOCHS FOLDER WEIGHTS SEED`; fastai runs in an environment of its own.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np
import torch
import torchvision

SIDE = 224


def pretrained(weights: str) -> Any:
    """Return mobilenet_v2 with these weights."""
    network = torchvision.models.mobilenet_v2(weights=None)
    network.load_state_dict(torch.load(weights, weights_only=True))
    return network


def labelled_files(folder: Path, split: str) -> tuple[list[Path], list[str]]:
    """Return the files of a split and their classes."""
    files = sorted(path for path in (folder / split).glob("*/*") if path.is_file())
    return files, [path.parent.name for path in files]


def probe(folder: Path, weights: str, _seed: int) -> float:
    """Return the accuracy of a logistic regression on frozen features, with the strength chosen on `val`."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    from tests.benchmarks.linear_probe import cropped, features_of

    backbone = pretrained(weights)
    backbone.classifier = torch.nn.Identity()
    backbone.eval()
    rows = {}
    for split in ("train", "val", "test"):
        files, labels = labelled_files(folder, split)
        rows[split] = features_of(files, backbone, cropped), np.array(labels)
    models = [
        make_pipeline(StandardScaler(), LogisticRegression(C=strength, max_iter=300)).fit(*rows["train"])
        for strength in (1e-3, 1e-2, 1e-1, 1.0)
    ]
    return float(max(models, key=lambda model: model.score(*rows["val"])).score(*rows["test"]))


def fine_tuned(folder: Path, weights: str, seed: int, epochs: int) -> float:
    """Return the accuracy after fastai's `fine_tune` with its default arguments and augmentation."""
    from fastai.vision.all import ImageDataLoaders, Resize, accuracy, aug_transforms, set_seed, vision_learner
    from fastai.vision.learner import model_meta

    def mobilenet(**_arguments: Any) -> Any:
        return pretrained(weights)

    model_meta[mobilenet] = {**model_meta[torchvision.models.resnet18], "cut": lambda network: network.features}
    set_seed(seed, reproducible=True)
    loaders = ImageDataLoaders.from_folder(
        folder,
        train="train",
        valid="val",
        seed=seed,
        item_tfms=Resize(SIDE),
        batch_tfms=aug_transforms(),
        num_workers=0,
    )
    learner = vision_learner(loaders, mobilenet, metrics=accuracy)
    with learner.no_bar(), learner.no_logging():
        learner.fine_tune(epochs)
        files, labels = labelled_files(folder, "test")
        predicted = learner.get_preds(dl=loaders.test_dl(files))[0].argmax(1)
    return float(np.mean([loaders.vocab[index] == label for index, label in zip(predicted, labels, strict=True)]))


def main() -> None:
    """Train, and print the result."""
    name, folder, weights, seed = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    if name != "probe":
        import fastai.vision.all  # noqa: F401  # its time is not that of training
    torch.manual_seed(seed)
    began = time.perf_counter()
    if name == "probe":
        found = probe(folder, weights, seed)
    else:
        found = fine_tuned(folder, weights, seed, int(name.partition("-")[2]))
    print(json.dumps({"accuracy": found, "seconds": time.perf_counter() - began}))


if __name__ == "__main__":
    main()
