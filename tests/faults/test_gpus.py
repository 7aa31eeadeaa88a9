"""Training runs that compete for the GPUs of a machine, and are killed while they have them."""

import time
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from tasks.config.distributed import DistributedConfig
from tasks.refs import CacheRef
from tasks.storage import Storage
from tasks.train.spec import TrainingSpec
from tests.builders.gpu_watch import GpuWatch
from tests.builders.killed_training import ENDLESS, TRAIN, start_launcher
from tests.builders.leftovers import Leftovers
from tests.builders.submissions import WAIT_SECONDS
from tests.faults.conftest import at_most

ROUNDS = at_most(10)
"""For each number of ranks."""


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_killed_run_frees_its_gpus_and_no_two_runs_share_one(
    cache: CacheRef, storage: Storage, tmp_path: Path, draw, monkeypatch: pytest.MonkeyPatch, num_ranks: int
) -> None:
    """Launcher or rank are killed while another run starts or waits, which then begins; the last run completes."""
    # Names of GPUs that are not there: the ranks train on the CPU. The slots are not those of other tests.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(("GPU-a", "GPU-b")[:num_ranks]))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    distributed = DistributedConfig(num_ranks=num_ranks)
    with ExitStack() as opened:
        watch = GpuWatch()
        opened.callback(watch.end)
        holder = None
        for number in range(ROUNDS + 1):
            train = (ENDLESS if number < ROUNDS else TRAIN).model_copy(update={"seed": number + 1})
            spec = TrainingSpec(train=train, distributed=distributed, cache=cache, storage=storage)
            launcher = opened.enter_context(start_launcher(spec, tmp_path / f"spec-{number}.json"))
            opened.callback(launcher.kill)
            watch.add(launcher.pid)
            if holder is not None:
                left, seconds, ranks = Leftovers(), draw.uniform(0, 10), watch.ranks(holder.pid)
                assert len(ranks) == num_ranks
                time.sleep(seconds)
                assert watch.ranks(launcher.pid) == []
                victim = draw.choice([psutil.Process(holder.pid), *ranks])
                print(f"round {number}, after {seconds:.1f} s: {'a rank' if victim in ranks else 'the launcher'}")
                left.note(psutil.Process(holder.pid).children(recursive=True))
                killed_at = time.monotonic()
                victim.kill()
                left.assert_none(killed_at)
                holder.communicate(timeout=60)
            deadline = time.monotonic() + WAIT_SECONDS
            while len(watch.ranks(launcher.pid)) < num_ranks:
                assert launcher.poll() is None, launcher.communicate()
                assert time.monotonic() < deadline
                time.sleep(0.1)
            holder = launcher
        assert holder is not None
        _output, errors = holder.communicate(timeout=WAIT_SECONDS)
        assert holder.returncode == 0, errors
        assert watch.shared == set()
