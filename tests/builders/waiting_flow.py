"""A deployed flow that waits, in place of a training run, and the code that deploys and submits it."""

import os
import time
from pathlib import Path

from flows.decorator import dag_flow


@dag_flow("waiting")
def waiting(folder: str, seconds: float) -> None:
    """Write the id of the process to the folder, and wait until the time is over or the folder has a file `end`."""
    Path(folder, f"{os.getpid()}.pid").touch()
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not Path(folder, "end").exists():
        time.sleep(0.2)


DEPLOY = """
from prefect.client.orchestration import get_client
from deployments.stack.register import create_pools
from tests.builders.waiting_flow import waiting
with get_client(sync_client=True) as client:
    create_pools(client)
    client.create_deployment(client.create_flow(waiting), "waiting", work_pool_name="gpu",
                             entrypoint="tests.builders.waiting_flow.waiting", tags=["of-deployment"])
"""
"""Code that creates the pools, and the deployment in the pool `gpu`."""

SUBMIT = """
import sys
from prefect import flow
from prefect.runtime import flow_run
from tasks.config.distributed import DistributedConfig
from tasks.orchestration.stage import stage
from tasks.orchestration.submission import submit

folder, seconds, settings = sys.argv[1], float(sys.argv[2]), sys.argv[3]
settings = DistributedConfig.model_validate_json(settings)

@stage("wait", retries=0)
def wait():
    submitted = submit(settings, "distributed", "training", {"folder": folder, "seconds": seconds})
    print("submitted", submitted.name, flush=True)
    submitted.wait()

@flow
def submits():
    wait()

submits()
print("completed")
"""
"""Code that submits the deployment and waits; its arguments are folder, seconds and DistributedConfig as JSON."""
