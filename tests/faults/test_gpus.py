"""Training runs that compete for the GPUs of a machine, and are killed while they have them."""

import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest

from tasks.config.distributed import DistributedConfig
from tasks.refs import CacheRef
from tasks.storage import Storage
from tasks.train.spec import TrainingSpec
from tests.builders.killed_training import TRAIN, start_launcher
from tests.builders.submissions import WAIT_SECONDS
from tests.builders.submitted_training import is_alive

ROUNDS = 10
"""For each number of ranks."""

ENDLESS = TRAIN.model_copy(update={"max_epochs": 9000, "patience": 9000})


class GpuWatch:
    """The GPUs that the ranks of several launchers see, and those that ranks of two of them saw at once."""

    def __init__(self) -> None:
        self.shared: set[str] = set()
        self._launchers: set[psutil.Process] = set()
        self._ranks: dict[psutil.Process, tuple[int, list[str]]] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def add(self, launcher: int) -> None:
        """Watch the ranks of a launcher, also those that outlive it."""
        self._launchers = {one for one in self._launchers if is_alive(one)} | {psutil.Process(launcher)}

    def ranks(self, launcher: int) -> list[psutil.Process]:
        """Return the running ranks of a launcher."""
        return [rank for rank, (own, _gpus) in self._ranks.copy().items() if own == launcher and is_alive(rank)]

    def end(self) -> None:
        """Stop watching."""
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.05):
            for launcher in self._launchers:
                with suppress(psutil.Error):
                    for child in launcher.children():
                        if child not in self._ranks and "tasks.launch.start_rank" in child.cmdline():
                            gpus = child.environ().get("CUDA_VISIBLE_DEVICES", "").split(",")
                            self._ranks[child] = launcher.pid, gpus
            users: dict[str, int] = {}
            for rank, (launcher, gpus) in self._ranks.items():
                if is_alive(rank):
                    self.shared.update(gpu for gpu in gpus if users.setdefault(gpu, launcher) != launcher)


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
                seconds, ranks = draw.uniform(0, 10), watch.ranks(holder.pid)
                assert len(ranks) == num_ranks
                time.sleep(seconds)
                assert watch.ranks(launcher.pid) == []
                victim = draw.choice([psutil.Process(holder.pid), *ranks])
                print(f"round {number}, after {seconds:.1f} s: {'a rank' if victim in ranks else 'the launcher'}")
                victim.kill()
                holder.communicate(timeout=60)
                _gone, alive = psutil.wait_procs(ranks, timeout=15)
                assert alive == []
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
