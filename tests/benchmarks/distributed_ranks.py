"""A rank of a training run in memory: trains some steps per line on stdin, and prints the time on stdout.

Run by tests/benchmarks/distributed.py as `distributed_ranks.py KIND:MODEL FOLDER`; the line `go` starts a round. All
kinds train the same network on the same batch.
"""

import json
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch
from torch.nn import functional

CLASSES = 10
LEARNING_RATE = 1e-3
SIDES = {"mobilenet_v2": 224, "resnet18": 64}
BATCHES = {"mobilenet_v2": 16, "resnet18": 32}
"""Side of the images in pixels, and images per rank and step."""
STEPS = {"mobilenet_v2": 4, "resnet18": 12}
"""Steps per round: a few seconds."""
CHECKPOINT_SECONDS = 86_400
"""Time between two checkpoints: none within a round of seconds, since that would be far more than by default."""

SAVES: list[Callable[[], None]] = []
"""The function that writes a checkpoint, of kinds that have one; it is measured after each round."""

WATCHES: list[Callable[[], float]] = []
"""The functions that return the seconds spent on the watchdog and the agreements so far, of kinds that have them."""

Run = Callable[[], None]
"""A function that trains the steps of a round."""


def batch(model: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return noise, uint8 (B, H, W, 3), and labels (B,)."""
    generator, side = torch.Generator().manual_seed(1), SIDES[model]
    images = torch.randint(0, 256, (BATCHES[model], side, side, 3), dtype=torch.uint8, generator=generator)
    return images, torch.arange(BATCHES[model]) % CLASSES


def network(model: str) -> Any:
    """Return our network in our precision."""
    from tasks.model.precision import choose_precision
    from tasks.model.training_network import build_classifier

    torch.manual_seed(1)
    classifier = build_classifier(model, "none", CLASSES, freeze_backbone=False)
    classifier.precision = choose_precision("auto", torch.device("cpu"), SIDES[model])
    return classifier.to(memory_format=torch.channels_last)


def ours(model: str, backend: str | None, folder: Path, *, watched: bool = False, compression: str = "none") -> Run:
    """Return our loop on a backend, or in a single process.

    Args:
        model: Name of the network.
        backend: horovod or torch; None for a single process.
        folder: Folder of the checkpoints.
        watched: Whether to report the activity and to agree on checkpoints and shutdowns, as a rank does.
        compression: Number format in which gradients are sent.
    """
    from tasks.cache.loader import Batch
    from tasks.collectives.reducer import Reducer
    from tasks.config.distributed import DistributedConfig
    from tasks.config.recipe import values_of
    from tasks.config.train import TrainConfig
    from tasks.launch.protocol import Reporter
    from tasks.launch.rank import make_reducer
    from tasks.model.device import make_optimizer
    from tasks.train.checkpoint import Checkpoints
    from tasks.train.loop import LoopSettings, train_one_epoch
    from tasks.train.progress import EarlyStopping, Progress
    from tasks.train.step_callback import NullStepCallback, StepCallback

    class Timed(StepCallback):
        """The callback between two steps, with the time that it takes, waiting for other ranks included."""

        total = 0.0

        def after_step(self) -> bool:
            began = time.perf_counter()
            is_over = super().after_step()
            self.total += time.perf_counter() - began
            return is_over

    reducer: Reducer = Reducer()
    if backend:
        settings = {"backend": backend, "gradient_compression": compression}
        reducer = make_reducer(2, DistributedConfig.model_validate(settings))
    classifier = network(model)
    inputs, labels = batch(model)
    content = Batch(inputs, labels, labels.numpy())

    class Memory:
        num_steps = STEPS[model]

        def num_global_rows(self, step: int, start: int = 0) -> int:
            return reducer.num_ranks * len(labels)

        def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
            return (content for _ in range(self.num_steps))

    train = TrainConfig(model=model, weights="none", freeze_backbone=False)
    optimizer = make_optimizer(values_of(train, {"learning_rate": LEARNING_RATE}), classifier)
    progress = Progress(EarlyStopping(patience=1, min_delta=0.0, higher_is_better=False))
    checkpoints, callback = Checkpoints(folder, keep=2, config={}), NullStepCallback()
    if watched:
        events, to_events = os.pipe()
        threading.Thread(target=lambda: list(os.fdopen(events)), daemon=True).start()
        Reporter(to_events).start()

        def save() -> None:
            collected = checkpoints.collect(classifier, optimizer, progress, reducer)
            if reducer.rank == 0:
                checkpoints.save(collected, progress, "run")

        SAVES.append(save)
        callback = timed = Timed(
            reducer, save, checkpoint_seconds=CHECKPOINT_SECONDS, seconds_left=lambda: float("inf")
        )
        WATCHES.extend((lambda: timed.total, activity_seconds))
    loop = LoopSettings(
        lambda step: LEARNING_RATE,
        torch.device("cpu"),
        reducer,
        max_epochs=1,
        monitor="val_loss",
        num_classes=CLASSES,
        step_callback=callback,
    )
    return lambda: (train_one_epoch(classifier, Memory(), optimizer, loop, 0), None)[1]


def activity_seconds() -> float:
    """Return the CPU seconds so far of the thread that reports the activity."""
    (thread,) = (each for each in threading.enumerate() if each.name == "activity")
    assert thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def bare(model: str, *, distributed: bool) -> Run:
    """Return a bare script: forward, backward and step, with torch's DistributedDataParallel as it comes."""
    classifier = network(model)
    inputs, labels = batch(model)
    averaging = classifier
    if distributed:
        torch.distributed.init_process_group("gloo", init_method="env://")
        averaging = torch.nn.parallel.DistributedDataParallel(classifier)
    optimizer = torch.optim.Adam(classifier.parameters(), lr=LEARNING_RATE, fused=True)
    classifier.train()

    def run() -> None:
        for _ in range(STEPS[model]):
            optimizer.zero_grad()
            functional.cross_entropy(averaging(inputs), labels).backward()
            optimizer.step()

    return run


KINDS: dict[str, Callable[[str, Path], Run]] = {
    "ours_alone": lambda model, folder: ours(model, None, folder),
    "horovod": lambda model, folder: ours(model, "horovod", folder),
    "horovod_watched": lambda model, folder: ours(model, "horovod", folder, watched=True),
    "horovod_fp16": lambda model, folder: ours(model, "horovod", folder, compression="fp16"),
    "torch": lambda model, folder: ours(model, "torch", folder),
    "torch_watched": lambda model, folder: ours(model, "torch", folder, watched=True),
    "torch_fp16": lambda model, folder: ours(model, "torch", folder, compression="fp16"),
    "torch_bf16": lambda model, folder: ours(model, "torch", folder, compression="bf16"),
    "bare_alone": lambda model, folder: bare(model, distributed=False),
    "bare": lambda model, folder: bare(model, distributed=True),
    "apart": lambda model, folder: bare(model, distributed=False),
}


def main() -> None:
    """Train some steps per line on stdin, and answer with their time in seconds."""
    warnings.filterwarnings("ignore")
    kind, _, model = sys.argv[1].partition(":")
    torch.set_num_threads(1)
    answers, sys.stdout = sys.stdout, sys.stderr
    run = KINDS[kind](model, Path(sys.argv[2]))
    run()  # Warm-up: the first allocations and connections.
    for _line in sys.stdin:
        watched = sum(watch() for watch in WATCHES)
        began = time.perf_counter()
        run()
        seconds = time.perf_counter() - began
        watching = sum(watch() for watch in WATCHES) - watched
        began = time.perf_counter()
        for save in SAVES:
            save()
        saving = time.perf_counter() - began
        answer = {"images": STEPS[model] * BATCHES[model], "seconds": seconds, "saving": saving, "watching": watching}
        print(json.dumps(answer), file=answers, flush=True)
    sys.stderr.flush()
    os._exit(0)  # All ranks end at once: none waits for another one's farewell.


if __name__ == "__main__":
    main()
