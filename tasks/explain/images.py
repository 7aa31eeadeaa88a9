"""Explanations of images that a user names: files, folders, or images of the table by their sha256."""

import logging
import os
import re
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory

from tasks.config.promotion import PromoteConfig
from tasks.config.serving import ExplainConfig
from tasks.config.storage import SparkConfig
from tasks.errors import WrongInput
from tasks.etl.extract import read_whole
from tasks.explain.explainer import Explainer
from tasks.model_package.reasons import BadImage
from tasks.paths import expand_user, local_path
from tasks.predict.champion import champion_of, translate_invalid
from tasks.predict.thumbnails import contents_in_table, thumbnail
from tasks.refs import ExplainedImage, ExplainReport
from tasks.spark.session import try_without_spark
from tasks.storage import Storage
from tasks.tables.snapshots import latest
from tasks.tracking.classifier_files import fetch_registered

logger = logging.getLogger("lakevision.explain")

DIGEST = re.compile("[0-9a-f]{64}")

PAGE_SIDE = 160
"""Longest side of an explained image in the artifact, in pixels."""

SETTING = "explain.images"


def explain_images(
    explain: ExplainConfig, promote: PromoteConfig, storage: Storage, spark: SparkConfig = SparkConfig()
) -> ExplainReport:
    """Write the heat map of each image to a folder.

    Args:
        explain: The images, and the class.
        promote: Settings with the model's name, if it is given.
        storage: Location of the tables and of the registry.
        spark: Settings of the session, which is started only for tables that only Spark can read.

    Raises:
        WrongInput: The model, an image or the class does not exist; or the network has no layer with places.
        TrackingUnavailable: The tracking server does not answer.
    """
    if not explain.images:
        raise WrongInput(
            f"{SETTING} is empty", setting=SETTING, way_out="give files, folders, or the sha256 of images in the table"
        )
    model = try_without_spark(lambda session: champion_of(promote, explain.alias, storage, session), spark, storage)
    with TemporaryDirectory() as scratch:
        try:
            with translate_invalid():
                explainer = Explainer(fetch_registered(storage, model, Path(scratch) / "model"))
        except ValueError as error:
            raise WrongInput(f"{model.name} version {model.version}: {error}", way_out="give another model") from None
    if explain.label is not None and explain.label not in explainer.classes:
        raise WrongInput(
            f"explain.label is '{explain.label}', which is not one of the {len(explainer.classes)} classes of "
            f"{model.name} version {model.version}",
            setting="explain.label",
            way_out="give a class of the model, or leave it empty for the most probable class",
        )
    folder = local_path(explain.folder or f"{storage.home}/explanations")
    if folder is None:
        raise WrongInput(
            f"explain.folder is '{explain.folder}', which is not on this machine",
            setting="explain.folder",
            way_out="give a folder of this machine",
        )
    written = expand_user(folder).absolute()
    written.mkdir(parents=True, exist_ok=True)
    found = []
    for number, (name, content) in enumerate(named_images(explain.images, explain.max_images, storage, spark)):
        try:
            explained = explainer.explain(content, explain.label)
        except BadImage as bad:
            logger.warning("'%s' is not explained: %s", name, bad)
            continue
        stem = re.sub(r"[^\w.-]+", "-", Path(name).stem)[:60]
        file = written / f"{number + 1:03d}-{stem}.jpg"
        file.write_bytes(explained.jpeg)
        small = thumbnail(explained.jpeg, PAGE_SIDE)
        found.append(
            ExplainedImage(
                path=name, label=explained.label, probability=explained.probability, file=str(file), thumbnail=small
            )
        )
    if not found:
        raise WrongInput(
            f"{SETTING} has no image that can be decoded", setting=SETTING, way_out="give files or folders of images"
        )
    return ExplainReport(model=model, folder=str(written), images=tuple(found))


def named_images(
    images: Sequence[str], max_images: int, storage: Storage, spark: SparkConfig
) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of the first of the named images.

    Raises:
        WrongInput: A file or folder does not exist, or the table has no such image.
    """
    found = chain.from_iterable(_images_of(given, storage, spark) for given in images)
    yield from islice(found, max_images)
    if next(found, None) is not None:
        logger.info("only the first %d images are explained (explain.max_images)", max_images)


def _images_of(given: str, storage: Storage, spark: SparkConfig) -> Iterator[tuple[str, bytes]]:
    if DIGEST.fullmatch(given):
        rows = [{"sha256": given}]
        path = storage.table("images")
        contents = try_without_spark(
            lambda session: contents_in_table(session, latest(session, path), storage, rows), spark, storage
        )
        if given not in contents:
            raise WrongInput(
                f"{SETTING} has '{given}', and the table '{path}' has no image with this sha256",
                setting=SETTING,
                way_out="give a sha256 of the table, or a file",
            )
        yield given, contents[given]
        return
    path_given = local_path(given)
    if path_given is None or not os.path.exists(path_given := expand_user(path_given).absolute()):
        raise WrongInput(
            f"{SETTING} has '{given}', which is not a file or folder on this machine",
            setting=SETTING,
            way_out="give files, folders, or the sha256 of images in the table",
        )
    root = path_given if path_given.is_dir() else path_given.parent
    files = sorted(path_given.rglob("*")) if path_given.is_dir() else [path_given]
    for file in files:
        if file.is_file() and not file.name.startswith("."):
            yield str(file), read_whole(file, os.path.realpath(root))
