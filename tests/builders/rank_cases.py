"""Training of tiny networks in ranks of both backends, once for all cases: rank_cases.py DEVICE FOLDER [CASES]."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters

from tasks.cache.loader import Batch
from tasks.collectives.reducer import Reducer
from tasks.config.distributed import DistributedConfig
from tasks.environment import rendezvous
from tasks.errors import Diverged
from tasks.launch.rank import make_reducer
from tasks.model.device import make_deterministic
from tasks.progress.activity import current, stepping
from tasks.refs import TRAIN, VAL
from tasks.train.checkpoint import Checkpoints, restore, restore_progress
from tasks.train.loop import LoopSettings, fit
from tasks.train.progress import EarlyStopping, Progress
from tasks.train.step import StepSettings, WeightAverage
from tasks.train.step_callback import NullStepCallback
from tests.builders.local_ranks import local_environments
from tests.builders.processes import ROOT

NUM_CLASSES, EPOCHS = 3, 2
BACKENDS = ("horovod", "torch")
OTHER = {"horovod": "torch", "torch": "horovod"}
TIMINGS = {"images_per_second", "data_wait_share", "train_seconds", "validation_seconds"}
START_SECONDS = 300
"""Limit for all ranks of a test, also on a busy machine."""


@dataclass(frozen=True)
class Case:
    """Settings of a training run."""

    step: StepSettings = field(default_factory=StepSettings)
    batch_norm: bool = False
    ema_decay: float | None = None
    first_is_frozen: bool = False
    """True: the first layer is trained only in a second phase."""
    interrupt_at: int | None = None
    """Step after which training is interrupted with a checkpoint; it is resumed from it."""
    non_finite_row: int | None = None
    """Row whose image is not finite."""
    is_compiled: bool = False


CASES = {
    "plain": Case(),
    "clipped": Case(StepSettings(max_gradient_norm=0.05, label_smoothing=0.1)),
    "accumulated": Case(StepSettings(accumulate_steps=2)),
    "synchronized": Case(StepSettings(sync_batch_norm=True), batch_norm=True),
    "accumulated_synchronized": Case(StepSettings(accumulate_steps=2, sync_batch_norm=True), batch_norm=True),
    "averaged": Case(ema_decay=0.9),
    "unfrozen": Case(first_is_frozen=True),
    "resumed": Case(interrupt_at=7),
    "diverged": Case(non_finite_row=3),
}

NORMED = {"normed": Case(batch_norm=True), "normed_compiled": Case(batch_norm=True, is_compiled=True)}
"""Cases whose batch norms have the statistics of a rank's own images, which a single process does not have."""

COMPILED = {
    f"{name}_compiled": replace(case, is_compiled=True) for name, case in CASES.items() if not case.step.sync_batch_norm
}
"""The cases that may be compiled, compiled: half a minute for each rank."""


class Interrupted(Exception):
    """The interruption of a case, after a step of all ranks."""


class DealtLoader:
    """Batches of unequal sizes for each rank, and batches with the rows of all ranks for a single process."""

    def __init__(self, sizes: list[list[int]], rank: int | None, non_finite_row: int | None = None) -> None:
        """Deal rows.

        Args:
            sizes: Number of rows for each step and rank.
            rank: The rank; None: a single process.
            non_finite_row: A row whose image is not finite.
        """
        totals = [sum(step) for step in sizes]
        generator = torch.Generator().manual_seed(5)
        self._images = torch.randn(sum(totals), 3, 6, 6, generator=generator, dtype=torch.float64)
        self._labels = torch.arange(len(self._images)) % NUM_CLASSES
        if non_finite_row is not None:
            self._images[non_finite_row] = torch.inf
        self._begins = list(accumulate(totals, initial=0))
        bounds = [list(accumulate(step, initial=begin)) for step, begin in zip(sizes, self._begins, strict=False)]
        self._rows = [
            torch.arange(*((edges[0], edges[-1]) if rank is None else edges[rank : rank + 2])) for edges in bounds
        ]

    @property
    def num_steps(self) -> int:
        """Number of batches per epoch."""
        return len(self._rows)

    def num_global_rows(self, step: int, start: int = 0) -> int:
        """Return the number of rows of all ranks."""
        step += self._begins.index(start)
        return self._begins[step + 1] - self._begins[step]

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """Yield the batches from row `start`, the first one of a step."""
        for rows in self._rows[self._begins.index(start) :]:
            yield Batch(self._images[rows], self._labels[rows], rows.numpy())


def sizes_of(num_ranks: int) -> list[list[int]]:
    """Return the rows of each rank by step: each rank has none, one, two, and one fewer and more than there are ranks.

    A single rank has at least one row in each step.
    """
    sizes = [0, 1, 2, num_ranks - 1, num_ranks + 1]
    least = 1 if num_ranks == 1 else 0
    return [[max(least, sizes[(rank + step) % len(sizes)]) for rank in range(num_ranks)] for step in range(len(sizes))]


class _Network(nn.Sequential):
    """Layers in a row. torch compiles this forward pass, but not that of its own `nn.Sequential`."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        for layer in self:
            inputs = layer(inputs)
        return inputs


class _InterruptAfter(NullStepCallback):
    """Callback that interrupts training after some steps; `save` is called on every rank."""

    def __init__(self, steps: int | None, save: Any) -> None:
        self._left, self._save = steps, save

    def after_step(self) -> bool:
        if self._left is not None:
            self._left -= 1
            if self._left == 0:
                self._save()
                raise Interrupted
        return False


class _Run:
    """State of a case, as in a new process."""

    def __init__(self, case: Case, reducer: Reducer, num_ranks: int, folder: Path, device: str) -> None:
        self._device = torch.device(device)
        make_deterministic(self._device)
        torch.manual_seed(1 + reducer.rank)  # Rank 0's weights count.
        norm = [nn.BatchNorm2d(4)] if case.batch_norm else []
        layers = [nn.Conv2d(3, 4, 3), *norm, nn.ReLU(), nn.Flatten(), nn.Linear(64, NUM_CLASSES)]
        self.model = _Network(*layers).double().to(self._device)
        if case.is_compiled:
            torch.compiler.reset()  # The graphs of all cases count towards torch's limit.
            self.model.compile()
        self._case, self._reducer = case, reducer
        self._rank = None if reducer.num_ranks != num_ranks else reducer.rank
        self._sizes = sizes_of(num_ranks)
        self.progress = Progress(EarlyStopping(patience=9, min_delta=0.0, higher_is_better=False))
        self.checkpoints = Checkpoints(folder, keep=1, config={})
        reducer.broadcast_model(self.model)

    def train(self, interrupt_at: int | None = None, name: str | None = None) -> None:
        """Train all phases, or resume the only one from a checkpoint."""
        for phase in range(2 if self._case.first_is_frozen else 1):
            self.model[0].requires_grad_(phase == 1 or not self._case.first_is_frozen)
            self.progress.first_epoch = self.progress.next_epoch if phase else 0
            self._train_phase(interrupt_at, name)

    def _train_phase(self, interrupt_at: int | None, name: str | None) -> None:
        case, reducer, progress, model = self._case, self._reducer, self.progress, self.model
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.0, momentum=0.9)
        if name is not None:
            content = self.checkpoints.load(name)
            restore_progress(content, progress, reducer.rank)
            restore(content, model, optimizer)

        def save() -> None:
            content = self.checkpoints.collect(model, optimizer, progress, reducer)
            if reducer.rank == 0:
                self.checkpoints.save(content, progress, "run")

        loop = LoopSettings(
            lambda step: 0.1 / (1 + step),
            self._device,
            reducer,
            max_epochs=EPOCHS,
            monitor="val_loss",
            num_classes=NUM_CLASSES,
            average=None if case.ema_decay is None else WeightAverage(model, case.ema_decay, progress.average),
            first_epoch=progress.first_epoch,
            step=case.step,
            step_callback=_InterruptAfter(interrupt_at, save),
        )
        loaders = {
            TRAIN: DealtLoader(self._sizes, self._rank, case.non_finite_row),
            VAL: DealtLoader(self._sizes[1:3], self._rank),
        }
        compiled_before = counters["stats"]["unique_graphs"]
        try:
            fit(model, loaders, optimizer, loop, progress, lambda metrics, progress: None)
        finally:
            reducer.release_model()
        # torch passes over what it cannot compile, in silence.
        assert (counters["stats"]["unique_graphs"] > compiled_before) == case.is_compiled

    def result(self) -> dict[str, Any]:
        """Return state dict and history."""
        history = [
            {name: value for name, value in asdict(metrics).items() if name not in TIMINGS}
            for metrics in self.progress.history
        ]
        return {"state": self.model.state_dict(), "history": history}


def run_case(case: Case, reducer: Reducer, num_ranks: int, folder: Path, device: str = "cpu") -> dict[str, Any]:
    """Train a case, and return its result, or the message of its error.

    Args:
        case: The case.
        reducer: The ranks, or a single process.
        num_ranks: Number of ranks, to whose rows those of a single process are equal.
        folder: Folder of its checkpoint.
        device: Device of the model.
    """
    run = _Run(case, reducer, num_ranks, folder, device)
    try:
        with suppress(Interrupted):
            run.train(case.interrupt_at)
            return run.result()
    except Diverged as diverged:
        return {"message": str(diverged), "rows": diverged.rows}
    return resume_case(case, reducer, num_ranks, folder, device)


def resume_case(case: Case, reducer: Reducer, num_ranks: int, folder: Path, device: str) -> dict[str, Any]:
    """Resume a case from its checkpoint, and return the result."""
    reducer.sum(torch.zeros(1))  # Rank 0 has written the checkpoint.
    run = _Run(case, reducer, num_ranks, folder, device)
    run.train(name=next(folder.glob("step-*.pt")).name)
    return run.result()


def start_ranks(
    num_ranks: int, folder: Path, names: Sequence[str] = (), device: str = "cpu"
) -> dict[str, list[dict[str, Any]]]:
    """Run cases in ranks of both backends; return the results of each backend and rank by case.

    Args:
        num_ranks: Number of ranks of each backend.
        folder: Folder to create, for results and checkpoints.
        names: Names of cases. Without names these are `CASES` and cases of their own: those that one backend interrupts
            and the other one resumes ("resumed_elsewhere"), waiting, and compressed gradients.
        device: Device of the models; cuda only for a single rank, and with Horovod built for it.
    """
    folder.mkdir()
    with (
        local_environments("horovod", num_ranks, START_SECONDS) as ours,
        local_environments("torch", num_ranks, START_SECONDS) as others,
    ):
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.builders.rank_cases", device, str(folder), *names],
                cwd=ROOT,
                env=os.environ | environment | other | {"OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for environment, other in zip(ours, others, strict=True)
        ]
        try:
            outputs = [rank.communicate(timeout=START_SECONDS)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * num_ranks, "\n".join(outputs)
    # Nothing but the notes of Gloo: a rank that ends makes no noise in the others.
    assert not any("Traceback" in output or "rror" in output for output in outputs), "\n".join(outputs)
    return {
        backend: [torch.load(folder / f"{backend}-{rank}.pt", weights_only=True) for rank in range(num_ranks)]
        for backend in BACKENDS
    }


def make_reducers() -> dict[str, Any]:
    """Return a reducer of each backend: several ranks as a training run with compressed gradients makes them."""
    from tasks.collectives.horovod_reducer import HorovodReducer
    from tasks.collectives.torch_reducer import TorchReducer

    num_ranks = int(os.environ["WORLD_SIZE"])
    if num_ranks == 1:  # For which a training run makes none.
        return {"horovod": HorovodReducer(), "torch": TorchReducer(rendezvous(), START_SECONDS)}
    horovod = make_reducer(num_ranks, DistributedConfig(backend="horovod", gradient_compression="fp16"))
    other = make_reducer(num_ranks, DistributedConfig(backend="torch", gradient_compression="bf16"))
    assert isinstance(horovod, HorovodReducer)
    assert isinstance(other, TorchReducer)
    return {"horovod": horovod, "torch": other}


def main(device: str, folder: Path, names: Sequence[str]) -> None:
    """Run cases as one rank."""
    reducers, num_ranks = make_reducers(), int(os.environ["WORLD_SIZE"])
    # Of the setting, which the case "compressed" has alone, in place of another start.
    sent_types = {backend: reducer._sent_type for backend, reducer in reducers.items()}
    for reducer in reducers.values():
        reducer._sent_type = None
    rank = reducers["torch"].rank
    cases, results = CASES | COMPILED | NORMED, dict[str, dict[str, Any]]()
    for backend, reducer in reducers.items():
        results[backend] = {
            name: run_case(cases[name], reducer, num_ranks, folder / f"{name}-{backend}", device)
            for name in names or CASES
        }
    for backend, reducer in () if names else reducers.items():
        interrupted = folder / f"resumed-{OTHER[backend]}"
        results[backend]["resumed_elsewhere"] = resume_case(CASES["resumed"], reducer, num_ranks, interrupted, device)
        results[backend]["waiting"] = {"kinds": kinds_of_waiting(reducer, folder)}
    for backend, reducer in reducers.items():
        if not names:
            for sent in dict.fromkeys((torch.float16, sent_types[backend])) if num_ranks > 1 else ():
                reducer._sent_type = sent
                name = f"compressed as {sent}"
                results[backend][name] = run_case(CASES["plain"], reducer, num_ranks, folder / name, device)
        torch.save(results[backend], folder / f"{backend}-{rank}.pt")
    for reducer in reducers.values():
        reducer.shut_down()


def kinds_of_waiting(reducer: Reducer, folder: Path) -> list[str]:
    """Return the kinds of activity of rank 0 in a backward pass for which it waits, until it was seen to wait.

    The other ranks begin their backward pass only then. Empty for them.
    """
    model, seen, kinds = nn.Linear(3, 1), folder / "seen", list[str]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    averaging, deadline = reducer.wrap_model(model), time.monotonic() + START_SECONDS / 2
    loss = averaging(torch.ones(2, 3)).sum()

    def watch() -> None:
        while "ranks" not in kinds and time.monotonic() < deadline:
            kinds.append(current().kind)
            time.sleep(0.01)
        seen.touch()

    with stepping("training", 0) as begin_step:
        begin_step(0)
        if reducer.rank == 0:
            watching = threading.Thread(target=watch)
            watching.start()
        while reducer.rank != 0 and not seen.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        reducer.backward(loss)

        def take_step() -> None:
            kinds.append(current().kind)
            optimizer.step()

        reducer.step(take_step)
    reducer.release_model()
    reducer.sum(torch.zeros(1))
    seen.unlink(missing_ok=True)
    reducer.sum(torch.zeros(1))
    return kinds


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
    sys.stdout.flush()
    os._exit(0)
