"""Throughput of two ranks over one, with Horovod, torch and a bare script of torch, and the cost of watching them.

Each rank has one thread. Networks are trained in full, on batches in memory. The kinds of a group run in turns; those
that are not measured are stopped. Two processes that train apart, without any communication, show what the cores give
at best.

Run: `make bench-distributed`; BENCH_ARGS=--quick for fewer rounds.
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tasks.config.train import TrainConfig
from tasks.environment import rank_environment
from tasks.system.listening import free_port
from tests.benchmarks.distributed_ranks import BATCHES, SIDES
from tests.benchmarks.figures import Figure, rate_figure, write_figures
from tests.benchmarks.peers import Peer, log_file
from tests.builders.local_ranks import local_environments

STALL_SECONDS = 3600

Comparisons = tuple[tuple[str, str, str, float | None], ...]
"""Comparisons: a kind, its peer, the title of the peer, and the ratio to reach or None."""

WITHOUT = "without watchdog and agreement on checkpoints"

GROUPS: tuple[Comparisons, ...] = (
    (
        ("horovod", "ours_alone", "1 rank", 1.8),
        ("torch", "ours_alone", "1 rank", 1.8),
        ("horovod", "bare", "bare script, 2 ranks", 0.95),
        ("torch", "bare", "bare script, 2 ranks", 0.95),
        ("horovod", "torch", "torch, 2 ranks", None),
    ),
    (
        ("bare", "bare_alone", "1 process of the bare script", None),
        ("apart", "bare_alone", "1 process of the bare script", None),
        ("torch", "apart", "2 processes without communication", None),
    ),
    (("horovod_watched", "horovod", WITHOUT, None), ("torch_watched", "torch", WITHOUT, None)),
    (("horovod_fp16", "horovod", "gradients sent as float32", None),),
    (
        ("torch_fp16", "torch", "gradients sent as float32", None),
        ("torch_bf16", "torch", "gradients sent as float32", None),
    ),
)
"""Comparisons within groups of kinds: a group has at most 8 processes of 2 GB each."""


class Ranks:
    """The processes of one kind, which train together."""

    def __init__(self, kind: str, model: str, folder: Path, log: Any, stack: ExitStack) -> None:
        if kind.startswith("horovod"):
            environments = stack.enter_context(local_environments("horovod", 2, STALL_SECONDS))
        elif kind.startswith("torch"):
            environments = stack.enter_context(local_environments("torch", 2, STALL_SECONDS))
        elif kind == "bare":
            shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
            environments = [shared | {"RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"} for rank in (0, 1)]
        elif kind == "apart":
            environments = [{}, {}]
        else:
            environments = [{}]
        common = rank_environment() | {"OMP_NUM_THREADS": "1"}
        self._peers = [
            Peer("distributed_ranks.py", f"{kind}:{model}", folder / kind, log, environment=common | environment)
            for environment in environments
        ]
        self.saving: list[float] = []
        """Seconds of a checkpoint after each round, of the slowest rank."""
        self.watching: list[float] = []
        """Share of each round that watchdog and agreements took, of the rank with the largest."""
        for peer in self._peers:
            stack.callback(peer.close)
            stack.callback(peer.send_signal, signal.SIGCONT)

    def speed(self) -> float:
        """Train some steps, and return the images per second of all ranks."""
        for peer in self._peers:
            peer.send_signal(signal.SIGCONT)
            peer.begin_round()
        answers = [peer.end_round() for peer in self._peers]
        self.pause()
        self.saving.append(max(answer["saving"] for answer in answers))
        self.watching.append(max(answer["watching"] / answer["seconds"] for answer in answers))
        return sum(answer["images"] for answer in answers) / max(answer["seconds"] for answer in answers)

    def pause(self) -> None:
        """Stop the processes, whose threads would take time from others."""
        for peer in self._peers:
            peer.send_signal(signal.SIGSTOP)


def measure(
    kinds: Sequence[str], model: str, num_rounds: int, folder: Path, log: Any
) -> tuple[dict[str, list[float]], dict[str, Ranks]]:
    """Train a network with each kind in turns; return images per second of each round, and the ranks."""
    speeds: dict[str, list[float]] = {kind: [] for kind in kinds}
    ranks: dict[str, Ranks] = {}
    with ExitStack() as stack:
        for kind in kinds:
            ranks[kind] = Ranks(kind, model, folder, log, stack)
            ranks[kind].speed()  # Warmed up, and stopped, before the next ones start.
        for number in range(num_rounds):
            # To and fro: a machine that becomes faster or slower within a round favours no kind.
            for kind in kinds if number % 2 == 0 else reversed(kinds):
                speeds[kind].append(ranks[kind].speed())
            print(", ".join(f"{kind} {found[-1]:.1f}" for kind, found in speeds.items()), "images/s", flush=True)
    return speeds, ranks


def compare(comparisons: Comparisons, model: str, num_rounds: int, folder: Path, log: Any) -> list[Figure]:
    """Return the figures of a group for a network."""
    kinds = dict.fromkeys(kind for first, second, _, _ in comparisons for kind in (first, second))
    speeds, ranks = measure(list(kinds), model, num_rounds, folder, log)
    figures = [speed_figure(speeds, model, kind, peer, title, goal) for kind, peer, title, goal in comparisons]
    for kind in kinds:
        if kind.endswith("_watched"):
            backend, each = kind.removesuffix("_watched"), ranks[kind]
            figures.append(watching_figure(backend, model, each.watching[-num_rounds:]))
            figures.append(checkpoint_figure(backend, model, each.saving[-num_rounds:]))
    return figures


def where_of(model: str) -> str:
    """Return network, image size and batch size, for figures."""
    return f"{model} at {SIDES[model]} pixels, {BATCHES[model]} images per rank"


def speed_figure(
    speeds: dict[str, list[float]], model: str, kind: str, peer: str, title: str, goal: float | None
) -> Figure:
    """Return the images per second of a kind beside those of another one."""
    pairs = list(zip(speeds[kind], speeds[peer], strict=True))
    return rate_figure(f"{kind}, 2 ranks, {where_of(model)}", "images/s", title, pairs, goal)


def watching_figure(kind: str, model: str, shares: Sequence[float]) -> Figure:
    """Return the share of the time that ranks spend on watchdog and agreements, which may be 2 %.

    Measured where it is spent: runs with and without differ by more than 2 % by chance. The wait for a slower rank is
    counted, although the next step would wait for it without the agreement.
    """
    share = median(shares)
    name = f"watchdog and agreement on checkpoints, {kind}, {where_of(model)}"
    return Figure(name, 100 * share, "%", "all of the time", 100.0, share, 0.02, share <= 0.02)


def checkpoint_figure(kind: str, model: str, saving: Sequence[float]) -> Figure:
    """Return the time of a checkpoint beside that between two by default, of which it may be 2 %."""
    seconds, between = median(saving), float(TrainConfig.model_fields["checkpoint_seconds"].default)
    share = seconds / between
    name = f"a checkpoint of {kind}, {where_of(model)}"
    return Figure(name, seconds, "s", "between two, by default", between, share, 0.02, share <= 0.02)


def main() -> None:
    """Run the benchmark, and write its figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two rounds")
    parser.add_argument("--rounds", type=int, default=10, help="rounds in turns")
    options = parser.parse_args()
    num_rounds = 2 if options.quick else options.rounds
    figures: list[Figure] = []
    with TemporaryDirectory() as scratch, log_file("distributed").open("w") as log:
        for model in SIDES:
            for number, comparisons in enumerate(GROUPS):
                figures += compare(comparisons, model, num_rounds, Path(scratch) / f"{model}-{number}", log)
    write_figures("distributed", figures, note=f"median of {num_rounds} rounds in turns, one thread per rank")


if __name__ == "__main__":
    main()
