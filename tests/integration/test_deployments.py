"""deployments/prefect.yaml: what it names exists, and its defaults are valid."""

import importlib

import pytest
import yaml
from prefect import Flow
from prefect.utilities.schema_tools.validation import validate

from tasks.config.distributed import DistributedConfig
from tasks.config.storage import StorageConfig
from tasks.config.tune import TuneConfig
from tasks.errors import WrongInput
from tasks.paths import is_inside
from tasks.refs import TableRef
from tasks.storage import resolve_storage
from tasks.tracking.model_names import derived_model_name
from tests.builders.processes import ROOT

FILE = ROOT / "deployments" / "prefect.yaml"
DEPLOYMENTS = {deployment["name"]: deployment for deployment in yaml.safe_load(FILE.read_text())["deployments"]}
MODULES = sorted(path.stem for path in (ROOT / "flows").glob("[a-z]*.py"))


def load(deployment: dict) -> Flow:
    """Import the flow of a deployment."""
    module, _, name = deployment["entrypoint"].rpartition(".")
    return getattr(importlib.import_module(module), name)


def test_every_flow_has_a_deployment():
    """One for the DAG and one a flow."""
    flows = {
        name
        for name in MODULES
        if any(isinstance(value, Flow) for value in vars(importlib.import_module(f"flows.{name}")).values())
    }
    assert {deployment["entrypoint"].split(".")[1] for deployment in DEPLOYMENTS.values()} == flows


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_entrypoints_import_and_default_parameters_are_valid(name):
    """What the worker will do with them."""
    deployment = DEPLOYMENTS[name]
    flow = load(deployment)
    assert flow.name == {"photos": "pipeline"}.get(name, name)
    parameters = deployment["parameters"]
    if name == "photos":  # its source is the user's to fill in
        with pytest.raises(WrongInput, match="etl.source"):
            flow.validate_parameters(parameters)
        parameters = {"config": parameters["config"] | {"source": "/data/photos"}}
    flow.validate_parameters(parameters)
    assert deployment["description"]
    assert "lakevision" in deployment["tags"]
    assert deployment["work_pool"]["name"] == ("gpu" if "gpu" in deployment["tags"] else "cpu")


def test_the_deployments_of_digits_and_of_photos_share_a_home_and_no_table(tmp_path):
    """A user tries the digits first: tables that were made from one source refuse another, and so would the model."""
    given = {name: item["parameters"]["config"].get("tables") for name, item in DEPLOYMENTS.items()}
    storages = {
        name: resolve_storage(StorageConfig(home=str(tmp_path), tables=tables)) for name, tables in given.items()
    }
    of_digits, of_photos = storages["pipeline"], storages["photos"]
    tables = ("images", "files", "predictions")
    assert not {of_digits.table(name) for name in tables} & {of_photos.table(name) for name in tables}
    assert all(is_inside(of_photos.table(name), str(tmp_path)) for name in tables)
    assert (of_photos.cache, of_photos.tracking) == (of_digits.cache, of_digits.tracking)
    # These two take the digits' tables, and say how they take others.
    for name in ("predict-batch", "maintain"):
        assert storages[name].tables == of_digits.tables
        assert f"set tables to {given['photos']}" in DEPLOYMENTS[name]["description"]
    models = {
        derived_model_name(TableRef(path=storage.table("images"), version=0, source=source, table_id=source), storage)
        for storage, source in ((of_digits, str(of_digits.digits)), (of_photos, "/photos"))
    }
    assert len(models) == 2


def test_schedules_are_paused_and_a_second_run_waits():
    """Daily for the DAG, hourly for inference."""
    scheduled = {name: item for name, item in DEPLOYMENTS.items() if item.get("schedules")}
    assert {name: item["schedules"][0]["cron"] for name, item in scheduled.items()} == {
        "pipeline": "0 2 * * *",
        "predict-batch": "0 * * * *",
    }
    for item in scheduled.values():
        assert item["schedules"][0]["active"] is False
        assert item["concurrency_limit"] == {"limit": 1, "collision_strategy": "ENQUEUE"}


def test_the_form_in_the_ui_is_typed():
    """Descriptions, defaults, choices and bounds reach the schema that the UI draws."""
    schema = load(DEPLOYMENTS["pipeline"]).parameters.definitions
    size = schema["CacheConfig"]["properties"]["image_size"]
    assert (size["minimum"], size["maximum"], size["default"]) == (16, 1024, 224)
    assert schema["TrainConfig"]["properties"]["optimizer"]["enum"] == ["adam", "adamw", "sgd"]
    for model in schema.values():
        for name, field in model.get("properties", {}).items():
            assert "$ref" in field or "allOf" in field or "description" in field, name


def test_a_run_with_two_wrong_settings_names_both():
    """In the state's message of a deployment's run, as on the command line."""
    with pytest.raises(WrongInput) as refused:
        load(DEPLOYMENTS["pipeline"]).validate_parameters({"config": {"image_size": 5, "train": {"max_epochs": 0}}})
    assert "config.cache.image_size is 5: input should be greater than or equal to 16" in str(refused.value)
    assert "config.train.max_epochs is 0: input should be greater than or equal to 1" in str(refused.value)


def test_every_deployment_fills_in_what_its_form_shows_first():
    """A switch that is left out would look switched off; a name may be empty."""
    for name, deployment in DEPLOYMENTS.items():
        model = load(deployment).fn.__annotations__["config"]
        settings = deployment["parameters"]["config"]
        assert settings.keys() <= model.first.keys(), name
        switches = {
            first
            for first, (group, field) in model.first.items()
            if model.model_fields[group].annotation.model_fields[field].annotation is bool
        }
        assert switches <= settings.keys(), name


def test_what_needs_a_gpu_is_submitted_to_the_gpu_pool():
    """By the deployments that the settings name by default."""
    gpu = {name for name, deployment in DEPLOYMENTS.items() if deployment["work_pool"]["name"] == "gpu"}
    submitted = {settings.deployment for settings in (DistributedConfig(), TuneConfig())}
    assert {f"{name}/{name}" for name in gpu} == submitted


@pytest.mark.parametrize("name", ["train-distributed", "train-trial"])
def test_what_a_flow_submits_to_the_gpu_pool_is_taken(name):
    """Whole settings, by group, with None where nothing is set: the server validates them before it creates a run."""
    flow = load(DEPLOYMENTS[name])
    config = flow.fn.__annotations__["config"]().model_dump()
    parameters = {"config": config, "cache_ref": {"url": "/cache", "digest": "0"}}
    assert validate(parameters, flow.parameters.model_dump_for_openapi()) == []
    config["train"]["max_epochs"] = 0
    assert len(validate(parameters, flow.parameters.model_dump_for_openapi())) == 1
