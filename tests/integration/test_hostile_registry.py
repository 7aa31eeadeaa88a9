"""Inference with a model registry to which an attacker can write."""

import hashlib
import json
import os
import pickle
import shutil
from pathlib import Path

import mlflow
import pytest
import torch
import yaml

from tasks.config.etl import EtlConfig
from tasks.config.promotion import PromoteConfig
from tasks.config.storage import SparkConfig
from tasks.errors import WrongInput
from tasks.etl.ingest import ingest_images
from tasks.refs import RunRef
from tasks.registry.aliases import CHAMPION
from tasks.registry.promote import promote_best
from tasks.tracking.models import tag_version, version_tags
from tests.builders.untrained_model import log_run, predict

NAME = "photos"
WEIGHTS_TAG = "lakevision.sha256.weights.safetensors"


class WriteFile:
    """A pickle that writes a file when it is loaded."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self):
        """Return a command for the unpickler to run."""
        return os.system, (f"touch '{self.file}'",)


@pytest.fixture
def registered(source, storage, tmp_path):
    """Return the version and the artifact folder of a champion that was trained on a small table."""
    ingest_images(EtlConfig(source=str(source)), storage, SparkConfig())
    run = log_run(storage, tmp_path, seed=1, accuracy=0.5)
    model = promote_best([run], PromoteConfig(model_name=NAME), storage).champion
    client = mlflow.MlflowClient(tracking_uri=storage.tracking)
    logged = client.get_run(run.run_id).outputs.model_outputs[0].model_id
    return model, Path(client.get_logged_model(logged).artifact_location.removeprefix("file://"))


def write_hostile_loader(folder: Path, file: Path) -> None:
    """Make all code and pickles of a model that MLflow would execute write `file`."""
    description = yaml.safe_load((folder / "MLmodel").read_text())
    flavor = description["flavors"]["python_function"]
    flavor |= {"loader_module": "evil", "code": "code", "python_model": "python_model.pkl", "cloudpickle_version": "3"}
    flavor.pop("model_code_path", None)
    flavor["data"] = "../../../.."
    (folder / "MLmodel").write_text(yaml.safe_dump(description))
    (folder / "code").mkdir(exist_ok=True)
    evil = f"import pathlib\npathlib.Path({str(file)!r}).touch()\ndef _load_pyfunc(path): raise SystemExit\n"
    (folder / "code" / "evil.py").write_text(evil)
    for module in (folder / "code").rglob("pyfunc.py"):
        module.write_text(evil)
    (folder / "python_model.pkl").write_bytes(pickle.dumps(WriteFile(file)))


def test_code_and_pickles_of_a_registered_model_are_not_executed(spark, registered, storage, tmp_path):
    """A model with its registered weights and hostile code predicts all images, and no code of it runs."""
    _model, folder = registered
    before = predict(storage, NAME)
    assert (before.predicted, before.errors) == (60, 0)
    shutil.rmtree(storage.table("predictions"))
    write_hostile_loader(folder, tmp_path / "executed")
    assert predict(storage, NAME).least_confident == before.least_confident
    assert not (tmp_path / "executed").exists()
    # Control: MLflow's own loader, which a user may choose, does execute the code.
    with pytest.raises(SystemExit):
        mlflow.pyfunc.load_model(str(folder))
    assert (tmp_path / "executed").exists()


def weights_of(folder: Path) -> Path:
    """Return the weights file of a logged model."""
    return next(folder.glob("data/*/weights.safetensors"))


def test_weights_changed_after_registration_are_rejected(spark, registered, storage, tmp_path):
    """Changed weights are not unpickled, and the error has both digests."""
    _model, folder = registered
    torch.save({"network": WriteFile(tmp_path / "executed")}, weights_of(folder))
    with pytest.raises(WrongInput, match="weights.safetensors with the sha256 .*changed"):
        predict(storage, NAME)
    assert not (tmp_path / "executed").exists()


def test_classes_changed_after_registration_are_rejected(spark, registered, storage):
    """With its classes in another order, a model would give each image a wrong label."""
    _model, folder = registered
    description = next(folder.glob("data/*/model.json"))
    content = json.loads(description.read_text())
    description.write_text(json.dumps(content | {"classes": content["classes"][::-1]}))
    with pytest.raises(WrongInput, match="model.json with the sha256 .* changed since"):
        predict(storage, NAME)


def test_pickle_with_a_matching_digest_is_rejected(spark, registered, storage, tmp_path):
    """An attacker who also writes the registry's tags cannot run code either."""
    model, folder = registered
    torch.save({"network": WriteFile(tmp_path / "executed")}, weights_of(folder))
    sha256 = hashlib.sha256(weights_of(folder).read_bytes()).hexdigest()
    tag_version(storage, model, {WEIGHTS_TAG: sha256})
    with pytest.raises(Exception, match="weights.safetensors is not a file of safetensors"):
        predict(storage, NAME)
    assert not (tmp_path / "executed").exists()


def test_link_out_of_the_model_folder_is_not_followed(spark, registered, storage, tmp_path):
    """A weights file is rejected where it is a link, or where its folder is one."""
    _model, folder = registered
    file = weights_of(folder)
    shutil.move(file, tmp_path / "elsewhere.pt")
    file.symlink_to(tmp_path / "elsewhere.pt")
    with pytest.raises(WrongInput, match="weights.safetensors, .* not a regular file"):
        predict(storage, NAME)
    file.unlink()
    shutil.move(tmp_path / "elsewhere.pt", file)
    shutil.move(file.parent, tmp_path / "folder")
    file.parent.symlink_to(tmp_path / "folder")
    with pytest.raises(WrongInput, match=r"photos version 1 cannot be read \(Invalid path"):
        predict(storage, NAME)


def test_version_without_digests_is_rejected_until_its_run_is_promoted(registered, storage):
    """A version without digest tags is rejected with a hint to promote its run, which adds the tags."""
    model, folder = registered
    client = mlflow.MlflowClient(tracking_uri=storage.tracking)
    other = client.create_model_version(NAME, source=folder.as_uri(), run_id=model.run_id)
    client.set_registered_model_alias(NAME, CHAMPION, other.version)
    with pytest.raises(WrongInput, match="version 2 has no tag lakevision.sha256.model.json"):
        predict(storage, NAME)
    # A version of a training run from before digests were logged.
    client.delete_model_version(NAME, other.version)
    client.set_registered_model_alias(NAME, CHAMPION, "1")
    client.delete_model_version_tag(NAME, "1", WEIGHTS_TAG)
    client.delete_tag(model.run_id, WEIGHTS_TAG)
    with pytest.raises(WrongInput, match=f"run the flow promote with run_ids \\['{model.run_id}'\\]"):
        predict(storage, NAME)
    again = promote_best([RunRef(run_id=model.run_id)], PromoteConfig(model_name=NAME), storage)
    assert (again.outcome, again.champion) == ("unchanged", model)
    sha256 = hashlib.sha256(weights_of(folder).read_bytes()).hexdigest()
    assert version_tags(storage, model)[WEIGHTS_TAG] == sha256
