"""The GPUs of training runs that compete for them, as their ranks see them."""

import threading
from contextlib import suppress

import psutil

from tests.builders.leftovers import is_alive


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
