"""The environment by which Horovod's ranks find each other, and their time limits."""

import os
import subprocess
import sys

import pytest

from tasks.launch.rendezvous import ranks_environments
from tests.builders.processes import ROOT

# Rank 1 never begins the operation that rank 0 waits in.
RANK = """
import sys, time
import horovod.torch as hvd
import torch
hvd.init()
if hvd.rank() == 0:
    hvd.allreduce(torch.ones(1), name="gradient")
sys.stdin.read()
"""


def test_single_process_needs_no_variables() -> None:
    """It does not even import Horovod."""
    with ranks_environments("horovod", 1, float("inf")) as environments:
        assert environments == [{}]


@pytest.mark.parametrize(("stall_seconds", "gloo"), [(10, 360), (600, 660)])
def test_gloo_gives_up_only_after_the_watchdog(stall_seconds: int, gloo: int) -> None:
    """Its limit follows from the setting, and is longer than that of a rank's start."""
    with ranks_environments("horovod", 2, stall_seconds) as environments:
        assert [one["HOROVOD_RANK"] for one in environments] == ["0", "1"]
        assert {one["HOROVOD_GLOO_TIMEOUT_SECONDS"] for one in environments} == {str(gloo)}
        assert {one["HOROVOD_STALL_CHECK_TIME_SECONDS"] for one in environments} == {str(stall_seconds)}


@pytest.mark.timeout(660)
def test_horovod_finds_a_stalled_rank() -> None:
    """The wheel is patched: without the patch, Horovod over Gloo waits forever and does not say for which rank."""
    with ranks_environments("horovod", 2, 1) as environments:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", RANK],
                cwd=ROOT,
                env=os.environ | environment | {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "2"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for environment in environments
        ]
        try:
            # They import torch first, which takes minutes on a busy machine.
            output, _ = ranks[0].communicate(timeout=300)
            ranks[1].communicate(timeout=300)
        finally:
            for rank in ranks:
                rank.kill()
    assert ranks[0].returncode != 0
    assert "Missing ranks:\n1!: [allreduce.gradient]" in output
