"""deployments/prefect.yaml: entrypoints exist, and default parameters are valid."""

import importlib

import pytest
import yaml
from prefect import Flow
from prefect.utilities.schema_tools.validation import validate

from tasks.config.distributed import DistributedConfig
from tasks.config.storage import StorageConfig
from tasks.config.submitted import SingleConfig
from tasks.config.tune import TuneConfig
from tasks.errors import WrongInput
from tasks.paths import is_inside
from tasks.refs import TableRef
from tasks.storage import resolve_storage
from tasks.tracking.models import derived_model_name
from tests.builders.processes import ROOT

FILE = ROOT / "deployments" / "prefect.yaml"
DEPLOYMENTS = {deployment["name"]: deployment for deployment in yaml.safe_load(FILE.read_text())["deployments"]}
MODULES = sorted(path.stem for path in (ROOT / "flows").glob("[a-z]*.py"))


def load(deployment: dict) -> Flow:
    """Import the flow of a deployment."""
    module, _, name = deployment["entrypoint"].rpartition(".")
    return getattr(importlib.import_module(module), name)


def test_every_flow_has_a_deployment():
    """The DAG and each flow have a deployment."""
    flows = {
        name
        for name in MODULES
        if any(isinstance(value, Flow) for value in vars(importlib.import_module(f"flows.{name}")).values())
    }
    assert {deployment["entrypoint"].split(".")[1] for deployment in DEPLOYMENTS.values()} == flows


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_entrypoints_import_and_default_parameters_are_valid(name):
    """A worker imports the entrypoint and validates the parameters in the same way."""
    deployment = DEPLOYMENTS[name]
    flow = load(deployment)
    assert flow.name == {"photos": "pipeline"}.get(name, name)
    parameters = deployment["parameters"]
    if name in {"photos", "scaling-ladder", "verdict"}:  # the user fills in its source
        with pytest.raises(WrongInput, match="etl.source"):
            flow.validate_parameters(parameters)
        parameters = {"config": parameters["config"] | {"source": "/data/photos"}}
    flow.validate_parameters(parameters)
    assert deployment["description"]
    assert "lakevision" in deployment["tags"]
    assert deployment["work_pool"]["name"] == ("gpu" if "gpu" in deployment["tags"] else "cpu")


def test_deployments_of_digits_and_photos_share_a_home_but_no_table(tmp_path):
    """Users try the digits first, and tables created from one source refuse another, as does the model."""
    given = {name: item["parameters"]["config"].get("tables") for name, item in DEPLOYMENTS.items()}
    storages = {
        name: resolve_storage(StorageConfig(home=str(tmp_path), tables=tables)) for name, tables in given.items()
    }
    of_digits, of_photos = storages["pipeline"], storages["photos"]
    tables = ("images", "files", "predictions")
    assert not {of_digits.table(name) for name in tables} & {of_photos.table(name) for name in tables}
    assert all(is_inside(of_photos.table(name), str(tmp_path)) for name in tables)
    assert (of_photos.cache, of_photos.tracking) == (of_digits.cache, of_digits.tracking)
    # These two use the digits' tables; their descriptions tell how to use others.
    for name in ("predict-batch", "predict-stream", "maintain"):
        assert storages[name].tables == of_digits.tables
        assert f"set tables to {given['photos']}" in DEPLOYMENTS[name]["description"]
    models = {
        derived_model_name(TableRef(path=storage.table("images"), version=0, source=source, table_id=source), storage)
        for storage, source in ((of_digits, str(of_digits.digits)), (of_photos, "/photos"))
    }
    assert len(models) == 2


def test_schedules_are_paused_and_concurrent_runs_are_queued():
    """The schedules of the DAG are daily, those of batch inference hourly and of a stream every ten minutes."""
    scheduled = {name: item for name, item in DEPLOYMENTS.items() if item.get("schedules")}
    assert {name: item["schedules"][0]["cron"] for name, item in scheduled.items()} == {
        "pipeline": "0 2 * * *",
        "photos": "0 3 * * *",
        "predict-batch": "0 * * * *",
        "predict-stream": "*/10 * * * *",
        "compare-live": "0 4 * * *",
    }
    for item in scheduled.values():
        assert item["schedules"][0]["active"] is False
        assert item["concurrency_limit"] == {"limit": 1, "collision_strategy": "ENQUEUE"}


def test_form_in_the_ui_is_typed():
    """The schema of the UI's form has descriptions, defaults, choices and bounds."""
    schema = load(DEPLOYMENTS["pipeline"]).parameters.definitions
    size = schema["CacheConfig"]["properties"]["image_size"]
    assert (size["minimum"], size["maximum"], size["default"]) == (16, 1024, 224)
    assert schema["TrainConfig"]["properties"]["device"]["enum"] == ["auto", "cpu", "cuda"]
    for model in schema.values():
        for name, field in model.get("properties", {}).items():
            assert "$ref" in field or "allOf" in field or "description" in field, name


def test_error_of_a_run_has_both_invalid_settings():
    """A deployment's run and the command line list all invalid settings."""
    with pytest.raises(WrongInput) as refused:
        load(DEPLOYMENTS["pipeline"]).validate_parameters({"config": {"image_size": 5, "train": {"max_epochs": 0}}})
    assert "config.cache.image_size is 5: input should be greater than or equal to 16" in str(refused.value)
    assert "config.train.max_epochs is 0: input should be greater than or equal to 1" in str(refused.value)


def test_every_deployment_sets_the_switches_shown_first_in_its_form():
    """The form shows a missing switch as off; other settings may be empty."""
    for name, deployment in DEPLOYMENTS.items():
        model = load(deployment).fn.__annotations__["config"]
        settings = deployment["parameters"]["config"]
        assert settings.keys() <= model.first_screen.keys(), name
        switches = {
            first
            for first, (group, field) in model.first_screen.items()
            if model.model_fields[group].annotation.model_fields[field].annotation is bool
        }
        assert switches <= settings.keys(), name


def test_deployments_of_the_gpu_pool_are_the_defaults_of_the_settings():
    """Distributed training and trials are submitted to the deployments of the GPU pool."""
    gpu = {name for name, deployment in DEPLOYMENTS.items() if deployment["work_pool"]["name"] == "gpu"}
    submitted = {settings.deployment for settings in (DistributedConfig(), TuneConfig(), SingleConfig())}
    assert {f"{name}/{name}" for name in gpu} == submitted


@pytest.mark.parametrize("name", ["train-distributed", "train-trial"])
def test_parameters_submitted_to_the_gpu_pool_are_valid(name):
    """A flow submits complete settings, with None for unset values, and the server validates them."""
    flow = load(DEPLOYMENTS[name])
    config = flow.fn.__annotations__["config"]().model_dump()
    parameters = {"config": config, "cache_ref": {"url": "/cache", "digest": "0"}}
    assert validate(parameters, flow.parameters.model_dump_for_openapi()) == []
    config["train"]["max_epochs"] = 0
    assert len(validate(parameters, flow.parameters.model_dump_for_openapi())) == 1
