"""Throughput of training, cost of the training loop, and time outside of steps, beside peers.

Peers in the same run: torchvision's reference loop on an ImageFolder, Lightning, and torch's bare forward, backward and
step. Lightning is installed into its own environment, and left out without a network.

Run: `make bench-train`, which then runs accuracy.py; BENCH_ARGS=--quick for fewer rounds and a shorter run.
"""

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch
from torch.nn import functional

from tasks.environment import rank_environment
from tests.benchmarks import train_data
from tests.benchmarks.figures import Figure, medians, rate_figure, write_figures
from tests.benchmarks.peers import Peer, install_beside, log_file

LIGHTNING = ("lightning>=2.5", "lightning-utilities", "torchmetrics", "pytorch-lightning")


def speed(peer: Peer) -> float:
    """Train some steps, and return the images per second."""
    answer = peer.run_round()
    return answer["images"] / answer["seconds"]


def compare_speeds(folder: Path, num_rounds: int, log: Any) -> list[Figure]:
    """Train the same network on the same images, in alternating rounds."""
    names = ["ours", "ours_fp32", "reference", "reference_same"]
    with ExitStack() as stack:
        python = install_beside(folder / "lightning", LIGHTNING, "lightning", log)
        if python is None:
            print(f"Lightning cannot be installed here and is left out: {log_file('train')}", flush=True)
        else:
            names += ["lightning", "lightning_same"]
        peers = []
        for name in names:
            interpreter = python if python and name.startswith("lightning") else sys.executable
            # Ours has the environment of a rank.
            environment = rank_environment() if name.startswith("ours") else None
            peers.append(Peer("train_peers.py", name, folder, log, interpreter, environment))
            stack.callback(peers[-1].close)
        speeds: dict[str, list[float]] = {name: [] for name in names}
        for number in range(num_rounds + 1):
            measured = {peer.name: speed(peer) for peer in peers}
            if number:  # The first round is a warm-up.
                for name, found in measured.items():
                    speeds[name].append(found)
            print(", ".join(f"{name} {found:.1f}" for name, found in measured.items()), "images/s", flush=True)
    figures = []
    for name, title in (("reference", "torchvision's reference loop"), ("lightning", "Lightning")):
        if name in speeds:
            figures += [
                compare(speeds, "ours", name, f"{title}, as it comes", 1.5),
                compare(speeds, "ours", f"{name}_same", f"{title}, our precision and memory format", 1.1),
                compare(speeds, "ours_fp32", name, f"ours in float32 beside {title}", None),
            ]
    return figures


def compare(speeds: dict[str, list[float]], mine: str, peer: str, title: str, goal: float | None) -> Figure:
    """Compare images per second with a peer; the ratio is the median over the rounds."""
    pairs = list(zip(speeds[mine], speeds[peer], strict=True))
    return rate_figure("images/s of full fine-tuning", "", title, pairs, goal)


def full_network() -> torch.nn.Module:
    """Return the network of full fine-tuning."""
    from tasks.model.training_network import build_classifier

    return build_classifier("resnet18", "none", 10, freeze_backbone=False).to(memory_format=torch.channels_last)


def head_alone() -> torch.nn.Module:
    """Return the head that is trained on the features of mobilenet_v2."""
    return torch.nn.Linear(1280, 10)


def loop_cost(num_rounds: int, steps: int, inputs: torch.Tensor, build: Callable[[], torch.nn.Module]) -> Figure:
    """Compare steps of our loop on inputs (B, ...) in memory with bare steps, alternating in one process."""
    from tasks.cache.loader import Batch
    from tasks.train.loop import train_one_epoch
    from tests.fakes.tiny_training import loop_of

    device = torch.device("cpu")
    labels = torch.arange(len(inputs)) % 10
    batch = Batch(inputs, labels, labels.numpy())

    class Memory:
        num_steps = steps

        def num_global_rows(self, step: int, start: int = 0) -> int:
            return len(labels)

        def epoch(self, number: int, start: int = 0) -> Any:
            return (batch for _ in range(steps))

    def make() -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(1)
        model = build()
        return model, torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)

    mine, bare = make(), make()

    def ours() -> None:
        train_one_epoch(mine[0], Memory(), mine[1], loop_of(lambda step: 1e-3, device=device), 0)

    def theirs() -> None:
        model, optimizer = bare
        model.train()
        for _ in range(steps):
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()

    pairs: list[tuple[float, float]] = []
    for number in range(num_rounds + 1):
        milliseconds = {}
        # The order alternates: each run inherits caches and clock rates from the run before.
        for run in (ours, theirs) if number % 2 else (theirs, ours):
            began = time.perf_counter()
            run()
            milliseconds[run] = (time.perf_counter() - began) * 1000
        if number:
            pairs.append((milliseconds[ours], milliseconds[theirs]))
    loop, bare, ratio = medians(pairs)
    # Steps on features take a tenth of a millisecond: the relative cost is large, the total small, hence no goal.
    goal = 1.03 if build is full_network else None
    return Figure(
        f"{steps} steps of the loop, " + ("images" if inputs.ndim == 4 else "features") + " in memory",
        loop,
        "ms",
        "bare forward, backward, step",
        bare,
        ratio,
        goal,
        None if goal is None else ratio <= goal,
    )


def time_outside(folder: Path, seconds: int) -> Figure:
    """Train for `seconds` with full logging, and return the share of time outside training and validation steps."""
    import mlflow

    from tasks.cache.manifest import read_manifest
    from tasks.config.storage import StorageConfig
    from tasks.config.train import TrainConfig
    from tasks.launch.launcher import launch_ranks
    from tasks.refs import CacheRef
    from tasks.storage import resolve_storage
    from tasks.tracking.server import prepare_tracking
    from tasks.train.spec import TrainingSpec

    url = str(folder / "uint8")
    manifest = read_manifest(url)
    assert manifest is not None
    storage = resolve_storage(StorageConfig(home=str(folder / "home-outside")))
    train = TrainConfig(
        model="mobilenet_v2", weights="none", freeze_backbone=False, max_epochs=1000, patience=1000, max_seconds=seconds
    )
    prepare_tracking(storage)  # Every flow does this before its first stage.
    began = time.perf_counter()
    spec = TrainingSpec(train=train, distributed=None, cache=CacheRef(url=url, digest=manifest.digest), storage=storage)
    run = launch_ranks(spec)
    whole = time.perf_counter() - began
    client = mlflow.MlflowClient(tracking_uri=storage.tracking)
    histories = [client.get_metric_history(run.run_id, name) for name in ("train_seconds", "validation_seconds")]
    inside = sum(metric.value for history in histories for metric in history)
    ratio = 1 - inside / whole
    return Figure(
        f"share outside steps, {whole:.0f} s of training",
        100 * ratio,
        "%",
        "the whole run",
        100.0,
        ratio,
        0.05,
        ratio <= 0.05,
    )


def main() -> None:
    """Run the benchmark, and write its figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and a shorter run")
    quick = parser.parse_args().quick
    figures: list[Figure] = []
    with TemporaryDirectory() as scratch, log_file("train").open("w") as log:
        train_data.write_noise(Path(scratch) / "noise", 1000)
        figures += compare_speeds(Path(scratch) / "noise", 2 if quick else 5, log)
        torch.manual_seed(1)
        images = torch.randint(0, 256, (16, 128, 128, 3), dtype=torch.uint8)
        # Many short rounds: the speed of a shared machine varies within seconds.
        figures.append(loop_cost(15 if quick else 100, 3, images, full_network))
        figures.append(loop_cost(5 if quick else 30, 1000, torch.randn(32, 1280), head_alone))
        figures.append(time_outside(Path(scratch) / "noise", 60 if quick else 270))
    write_figures("train", figures, note="median of rounds in turns; " + ("quick" if quick else "in full"))


if __name__ == "__main__":
    main()
