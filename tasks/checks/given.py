"""Checks of the paths and the network that a user named, before a server or a session starts."""

import os

from pydantic import BaseModel

from tasks.config.etl import BUILTIN_DIGITS, EtlConfig
from tasks.config.prediction import PredictConfig
from tasks.config.train import TrainConfig
from tasks.etl.listing import local_files
from tasks.model.pretrained import check_model_name, check_weights_file, names_model
from tasks.paths import expand_user, local_path


def check_given(config: BaseModel) -> None:
    """Check the local paths and the model name of a flow's parameters; URLs and contents are left to its stages.

    Raises:
        WrongInput: A folder or file does not exist, or there is no such classifier.
        SourceUnavailable: A folder cannot be looked at.
    """
    etl, predict, train = (getattr(config, name, None) for name in ("etl", "predict", "train"))
    if isinstance(etl, EtlConfig) and etl.source != BUILTIN_DIGITS:
        _check_folder(etl.source, "class folders with images", "source")
    if isinstance(predict, PredictConfig) and predict.source:
        _check_folder(predict.source, "images", "predict.source")
    if isinstance(train, TrainConfig):
        check_model_name(train.model)
        if train.weights not in {"none", "DEFAULT"} and not names_model(train.weights):
            check_weights_file(train.weights)


def _check_folder(source: str, what: str, setting: str) -> None:
    folder = local_path(source)
    if folder is not None and not os.path.isdir(folder := expand_user(folder).absolute()):
        next(local_files(folder, what, setting))  # It raises the sentence.
