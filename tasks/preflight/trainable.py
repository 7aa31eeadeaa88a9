"""Refuse what cannot be trained, by building the network and looking at one image; loads torch."""

import shutil

import torch

from tasks.config.cache import CacheConfig
from tasks.config.train import TrainConfig
from tasks.environment import cxx_compiler
from tasks.errors import WrongInput
from tasks.model.device import choose_device
from tasks.model.network import build_classifier
from tasks.model.precision import choose_precision
from tasks.train.features import ends_in_head, sample_images


def check_training(train: TrainConfig, cache: CacheConfig, *, here: bool = True) -> None:
    """Refuse a model, weights, layers, device, precision, size or compiler that cannot be, before a cache is built.

    Args:
        train: What is to be trained.
        cache: Its images.
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
