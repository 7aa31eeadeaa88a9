"""Tests of the base job templates of work pools: their form, their defaults, and the values of single runs."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from docker.types import DeviceRequest, HostConfig
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]  # Prefect validates with it; no stubs
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.utilities.templating import apply_values
from prefect.workers.process import ProcessJobConfiguration, ProcessWorker

from tests.builders.processes import ROOT

POOLS = ROOT / "deployments" / "pools"
KINDS = ["process", "docker", "kubernetes"]
REQUIRED_IN_JOBS = {"parallelism": 1, "completions": 1, "restartPolicy": "Never"}
"""What Prefect's Kubernetes worker requires of the template of a pod."""


def template(kind: str) -> dict[str, Any]:
    """Return the base job template of a kind of pool."""
    loaded: dict[str, Any] = json.loads((POOLS / f"{kind}.json").read_text())
    return loaded


def configuration(kind: str, **given: Any) -> dict[str, Any]:
    """Return the job configuration of a run that gives job variables, as a worker resolves it."""
    properties = template(kind)["variables"]["properties"]
    values = {name: variable["default"] for name, variable in properties.items()} | given
    resolved: dict[str, Any] = apply_values(template(kind)["job_configuration"], values, remove_notset=True)
    return resolved


@pytest.mark.parametrize("kind", KINDS)
def test_template_has_the_form_that_prefect_accepts(kind: str) -> None:
    """Every placeholder is a variable, every variable is used, and every default is valid."""
    given = template(kind)
    WorkPoolCreate(name="gpu", type=kind, base_job_template=given)
    used = set(re.findall(r"\{\{ (\w+) \}\}", json.dumps(given["job_configuration"])))
    properties = given["variables"]["properties"]
    assert used == properties.keys()
    defaults = {name: variable["default"] for name, variable in properties.items()}
    Draft202012Validator(given["variables"]).validate(defaults)
    assert all(variable["title"] and variable["description"] for variable in properties.values())
    assert "{{" not in json.dumps(configuration(kind))


def test_process_template_has_the_names_of_the_installed_worker() -> None:
    """A run gives its own environment; the rest is that of the pool."""
    own, installed = template("process"), ProcessWorker.get_default_base_job_template()
    assert own["job_configuration"] == installed["job_configuration"]
    assert own["variables"]["properties"].keys() == installed["variables"]["properties"].keys()
    job = ProcessJobConfiguration.model_validate(configuration("process", env={"CUDA_VISIBLE_DEVICES": "0,1"}))
    assert job.env == {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert job.stream_output


def test_container_gets_gpus_and_no_privileges() -> None:
    """The options of the container are those of the installed client of Docker."""
    extra = configuration("docker", gpus=2)["container_create_kwargs"]
    (request,) = extra["device_requests"]
    assert DeviceRequest(**request)["Count"] == 2
    made = HostConfig(version="1.44", **extra)
    assert made["ShmSize"] == 2 * 2**30
    assert made["CapDrop"] == ["ALL"]
    assert made["DeviceRequests"][0]["Capabilities"] == [["gpu"]]


def test_job_has_what_the_kubernetes_worker_requires() -> None:
    """GPUs, memory and image of a run are in its manifest, and no process in it has privileges."""
    manifest = configuration("kubernetes", gpus=4, memory="64Gi", image="registry.example/lakevision:1")["job_manifest"]
    pod = manifest["spec"]["template"]["spec"]
    assert pod.items() >= REQUIRED_IN_JOBS.items()
    assert (manifest["apiVersion"], manifest["kind"], manifest["spec"]["backoffLimit"]) == ("batch/v1", "Job", 0)
    (container,) = pod["containers"]
    assert container["name"] == "prefect-job"
    assert container["image"] == "registry.example/lakevision:1"
    assert container["resources"]["limits"] == {"memory": "64Gi", "nvidia.com/gpu": 4}
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert pod["securityContext"]["runAsNonRoot"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_every_template_is_tested() -> None:
    """A new file needs a kind above."""
    assert sorted(path.stem for path in Path(POOLS).iterdir()) == sorted(KINDS)
