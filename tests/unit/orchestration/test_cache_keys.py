"""Cache keys of the stages, which Prefect computes from the parameters of a call."""

import importlib
import inspect
import re
from typing import Any

import pytest

from tasks.orchestration.stage import Stage
from tests.builders.processes import ROOT

MODULES = sorted(".".join(file.relative_to(ROOT).with_suffix("").parts) for file in ROOT.glob("tasks/*/task.py"))

STAGES = [
    stage
    for module in MODULES
    for stage in vars(importlib.import_module(module)).values()
    if isinstance(stage, Stage) and stage.cache_key_fn is not None
]


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_cache_key_reads_parameters_that_the_stage_has(stage: Stage[..., Any]) -> None:
    """Prefect logs an error in a cache key and runs the stage again, so a wrong name would go unnoticed."""
    parameters = set(inspect.signature(stage.fn).parameters)
    read = set(re.findall(r'parameters\["(\w+)"\]', inspect.getsource(stage.cache_key_fn)))

    assert read
    assert read <= parameters


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_parameter_that_a_shared_cache_key_may_lack_belongs_to_another_stage(stage: Stage[..., Any]) -> None:
    """With a wrong name, the stages that share the key would have the same one, and get each other's results."""
    sharing = [other for other in STAGES if other.cache_key_fn is stage.cache_key_fn]
    parameters = {name for other in sharing for name in inspect.signature(other.fn).parameters}
    optional = set(re.findall(r'parameters\.get\("(\w+)"\)', inspect.getsource(stage.cache_key_fn)))

    assert optional <= parameters


def test_stages_with_a_cache_key_are_those_of_cache_and_training() -> None:
    """The list above is not empty by accident."""
    assert {"cache", "train", "train-distributed"} <= {stage.name for stage in STAGES}
