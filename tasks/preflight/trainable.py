"""Refuse what cannot be trained, by building the network and looking at one picture; loads torch."""

import shutil
from itertools import islice

import torch

from tasks.config import CacheConfig, TrainConfig, TuneRun
from tasks.config.tune import MOST_CORNERS, corners, with_values
from tasks.environment import cxx_compiler
from tasks.errors import WrongInput
from tasks.train.device import choose_device
from tasks.train.features import ends_in_head, sample_images
from tasks.train.model import build_classifier
from tasks.train.precision import choose_precision


def check_training(train: TrainConfig, cache: CacheConfig, *, here: bool = True) -> None:
    """Refuse a model, weights, layers, device, precision, size or compiler that cannot be, before a cache is built.

    Args:
        train: What is to be trained.
        cache: Its pictures.
        here: Whether on this machine; else nothing is said of device, precision and compiler.

    Raises:
        WrongInput: Names the setting, its value, and the way out.
    """
    device = choose_device(train.device, 0) if here else None
    if device is not None:
        choose_precision(train.precision, device)
    classifier = build_classifier(train.model, train.weights, 2, train.freeze_backbone)
    for stage in train.fine_tune:
        classifier.unfreeze_from(stage.unfreeze_from)
    side = cache.image_size
    sample = sample_images(side)
    try:
        with torch.no_grad():
            classifier.train()(sample)
    except Exception as error:  # Each architecture fails in its own way on a size it was not made for.
        raise WrongInput(
            f"cache.image_size is {side}, which train.model '{train.model}' does not take ({error}): "
            "give the size the model was made for, 224 for most"
        ) from error
    on_cpu = device is not None and device.type == "cpu"
    if on_cpu and train.compile and not (train.is_head_alone and ends_in_head(classifier, sample)):
        _check_compiler()


def _check_compiler() -> None:
    compiler = cxx_compiler()
    if shutil.which(compiler) is None:
        raise WrongInput(
            f"train.compile is true, which needs a C++ compiler on a CPU, and '{compiler}' is not there: install g++, "
            "name another one in $CXX, or set train.compile to false"
        )


def check_search(config: TuneRun, *, here: bool = True) -> None:
    """Refuse a search whose trials could not all be trained, before a cache is built for it.

    Args:
        config: The search.
        here: Whether its trials run on this machine, as `check_training` has it.

    Raises:
        WrongInput: Names the setting, its value, and the way out.
    """
    drawn = [with_values(config.train, values) for values in islice(corners(config.tune.space), MOST_CORNERS)]
    for device, precision in {(one.device, one.precision) for one in drawn if here}:
        choose_precision(precision, choose_device(device, 0))
    # Networks are built once each, whatever else of them is searched.
    for train in {(one.model, one.weights, one.freeze_backbone): one for one in drawn}.values():
        check_training(train, config.cache, here=here)
