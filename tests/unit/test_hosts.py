"""The setting of hosts and of the launcher, in Python, on the command line and in the form."""

import re
from typing import Any

import pytest
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]  # Prefect validates with it; no stubs
from pydantic import ValidationError

from tasks.config.distributed import DistributedConfig, TrainDistributedRun, parse_hosts
from tasks.config.pipeline import PipelineConfig
from tasks.config.storage import SparkConfig
from tasks.errors import explain


def form_accepts(settings: dict[str, Any]) -> bool:
    """Return whether the form of distributed training accepts its settings."""
    return bool(Draft202012Validator(DistributedConfig.model_json_schema()).is_valid(settings))


def test_hosts_have_a_name_and_a_number_of_ranks_each() -> None:
    """Spaces around commas are allowed, and the order is kept."""
    settings = DistributedConfig(num_ranks=6, launcher="hosts", hosts="node2:4, 10.0.0.1:2")
    assert parse_hosts(settings.hosts) == [("node2", 4), ("10.0.0.1", 2)]
    assert form_accepts({"num_ranks": 6, "launcher": "hosts", "hosts": "node2:4, 10.0.0.1:2"})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"launcher": "hosts", "hosts": "a"},
            "hosts: it is 'a', which is not a list of hosts: write names and numbers",
        ),
        ({"launcher": "hosts", "hosts": "-oProxyCommand=x:1"}, "which is not a list of hosts"),
        ({"launcher": "hosts", "hosts": "a:1;b:1"}, "which is not a list of hosts"),
        ({"launcher": "hosts", "hosts": "a:0"}, "which is not a list of hosts"),
        ({"launcher": "hosts", "hosts": "user@a:2"}, "which is not a list of hosts"),
    ],
)
def test_wrong_hosts_are_refused_by_call_and_form(settings: dict[str, Any], message: str) -> None:
    """The sentence has the value and the way out."""
    with pytest.raises(ValidationError) as refused:
        DistributedConfig(**settings)
    assert message in explain(refused.value)
    assert not form_accepts(settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"launcher": "hosts"}, "launcher is 'hosts', but hosts is empty: name them, such as node1:4,node2:4"),
        ({"hosts": "a:2"}, "hosts is 'a:2', but launcher is 'local': set launcher to hosts, or leave hosts out"),
        (
            {"host_python": "/py"},
            "host_python is '/py', but launcher is 'local': set launcher to hosts, or leave host_",
        ),
        ({"launcher": "spark", "ssh_config": "c"}, "ssh_config is 'c', but launcher is 'spark': set launcher to hosts"),
        ({"interface": "ib0"}, "interface is 'ib0', but launcher is 'local', whose ranks use the loopback one: set"),
        ({"shared_home": False}, "shared_home is false, but launcher is 'local', whose ranks are on one machine: set"),
        ({"min_ranks": 1}, "min_ranks is 1, but max_restarts is 0, so ranks never start again: set max_restarts, or"),
        (
            {"launcher": "hosts", "hosts": "a:1,a:1"},
            "hosts: it is 'a:1,a:1', which names 'a' twice: give each host once",
        ),
        (
            {"launcher": "hosts", "hosts": "a:5000"},
            "hosts: it is 'a:5000', with 5000 ranks on a host: give at most 4096",
        ),
        (
            {"launcher": "hosts", "hosts": "a:1"},
            "num_ranks is 2, but hosts 'a:1' has places for 1 ranks: give at most 1",
        ),
    ],
)
def test_hosts_that_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    """A pattern of the form cannot express these rules."""
    with pytest.raises(ValidationError) as refused:
        DistributedConfig(**settings)
    assert message in explain(refused.value)


def test_launcher_spark_needs_a_cluster() -> None:
    """The DAG refuses it only where it trains with ranks."""
    distributed = DistributedConfig(launcher="spark")
    message = re.escape("distributed.launcher is 'spark', but spark.master is 'local[*]', which is this machine: name ")
    with pytest.raises(ValidationError, match=message):
        TrainDistributedRun(distributed=distributed)
    with pytest.raises(ValidationError, match=message):
        PipelineConfig(distributed=distributed, train_on="both")
    assert PipelineConfig(distributed=distributed).distributed == distributed
    spark = SparkConfig(master="spark://10.0.0.1:7077")
    assert TrainDistributedRun(distributed=distributed, spark=spark).distributed == distributed
