"""Check that a model can be trained: its network is built and applied to a sample.

Importing this module imports torch.
"""

import logging

import torch

from tasks.config.cache import CacheConfig
from tasks.config.distributed import DistributedConfig
from tasks.config.train import TrainConfig
from tasks.errors import WrongInput
from tasks.launch.gpus import obstacle_here
from tasks.model.device import check_compiler, choose_device
from tasks.model.precision import choose_precision
from tasks.model.pretrained import preprocessing
from tasks.model.training_network import build_classifier
from tasks.model_package.classifier import TYPES
from tasks.model_package.description import TIMM
from tasks.model_package.network import WithoutMemory, build_network
from tasks.train.features import ends_in_head, sample_images

logger = logging.getLogger("lakevision.preflight")


def check_training(
    train: TrainConfig, cache_config: CacheConfig, *, here: bool = True, distributed: DistributedConfig | None = None
) -> None:
    """Check model, weights, layers, device, precision, image size and compiler before a cache is built.

    Args:
        train: Settings of the training run.
        cache_config: Settings of its images.
        here: Whether it runs on this machine; if not, device, precision and compiler are not checked.
        distributed: Settings of ranks on this machine, which must be able to use the GPUs of `train.device`.

    Raises:
        WrongInput: A check failed; the message has the setting, its value and the way out.
    """
    obstacle = None if distributed is None else obstacle_here(train.device, distributed)
    device = choose_device(train.device, 0, obstacle) if here else None
    if device is not None:
        choose_precision(train.precision, device)
    classifier = build_classifier(train.model, train.weights, 2, train.trained != "all")
    for stage in train.fine_tune:
        classifier.unfreeze_from(stage.unfreeze_from)
    side = cache_config.image_size
    if difference := classifier.made_for.difference(side):
        logger.info("cache.image_size is %d; %s", side, difference)
    if train.model.startswith(TIMM):
        _check_package(train.model)
    sample = sample_images(side)
    try:
        with torch.no_grad():
            classifier.train()(sample)
    except Exception as error:  # Each architecture raises its own exceptions for an unsupported size.
        designed = classifier.made_for.image_size or preprocessing(train.model, "DEFAULT").image_size
        raise WrongInput(
            f"cache.image_size is {side}, which train.model '{train.model}' does not accept ({error})",
            setting="cache.image_size",
            way_out=f"set cache.image_size to {designed}, the size that it was designed for",
        ) from error
    on_cpu = device is not None and device.type == "cpu"
    if on_cpu and train.compile and not (train.trains_head_only and ends_in_head(classifier, sample)):
        check_compiler()


def _check_package(name: str) -> None:
    """Check that a model package can hold a network of timm, as it can all of torchvision.

    Raises:
        WrongInput: Layers share weights, weights have other types, or the network cannot be built without memory.
    """
    try:
        with WithoutMemory():
            values = build_network(name, 2).state_dict(keep_vars=True).values()
    except RuntimeError:  # It computes on its weights as it is built.
        values = {}.values()
    if not values or len({id(value) for value in values}) < len(values) or {value.dtype for value in values} - {*TYPES}:
        raise WrongInput(
            f"train.model is '{name}', whose weights a model package cannot hold",
            setting="train.model",
            way_out="choose another network",
        )
