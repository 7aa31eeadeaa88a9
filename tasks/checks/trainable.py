"""Check that a model can be trained: its network is built and applied to a sample.

Importing this module imports torch.
"""

import torch

from tasks.config.cache import CacheConfig
from tasks.config.distributed import DistributedConfig
from tasks.config.train import TrainConfig
from tasks.errors import WrongInput
from tasks.launch.gpus import obstacle_here
from tasks.model.device import check_compiler, choose_device
from tasks.model.precision import choose_precision
from tasks.model.training_network import build_classifier
from tasks.train.features import ends_in_head, sample_images


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
    sample = sample_images(side)
    try:
        with torch.no_grad():
            classifier.train()(sample)
    except Exception as error:  # Each architecture raises its own exceptions for an unsupported size.
        raise WrongInput(
            f"cache.image_size is {side}, which train.model '{train.model}' does not accept ({error})",
            setting="cache.image_size",
            way_out="give the size that the model was designed for, 224 for most",
        ) from error
    on_cpu = device is not None and device.type == "cpu"
    if on_cpu and train.compile and not (train.trains_head_only and ends_in_head(classifier, sample)):
        check_compiler()
