"""The steps of the scaling ladder: their settings, or why they are left out, and their figures.

They are those of Databricks' "How (Not) to Scale Deep Learning in 6 Easy Steps" (2019), with the settings of the user.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import Field

from tasks.config.distributed import DistributedConfig
from tasks.config.pipeline import LadderRun
from tasks.config.train import TrainConfig
from tasks.interval import wilson_interval
from tasks.progress.count import format_seconds
from tasks.refs import Ref, RunRef
from tasks.storage import Storage
from tasks.tracking.evaluated import evaluated_run
from tasks.tracking.runs import run_metrics, run_seconds

SMALL_BATCH, DROPOUT = 2, 0.5
"""Images per step of the first steps, and the dropout of the third: those of the published steps."""

NO_STOPPING = 10_000
"""Patience of the first step, which no training run uses up."""

WORTHWHILE = 600.0
"""Seconds of training below which more hardware is not worth its set-up."""

EFFICIENT = 0.5
"""Speed-up per rank below which ranks share what they need, such as the cores of a machine."""


@dataclass(frozen=True)
class Step:
    """A step of the ladder."""

    name: str
    train: TrainConfig
    on_sample: bool = False
    distributed: DistributedConfig | None = None
    """Settings of its ranks; None: one process."""
    machines: int = 1
    left_out: str = ""
    """Why it is left out; empty if it is run."""


class StepResult(Ref):
    """Figures of a step; a step that was left out has only its name and the reason."""

    name: str
    left_out: str = ""
    images: int = 0
    """Images in the split `train`."""
    ranks: int = 1
    accuracy: float = 0.0
    """Test accuracy (0-1): of the sample's own test images in the steps on the sample."""
    interval: tuple[float, float] | None = None
    """95 % interval (Wilson) of the accuracy."""
    seconds: float = 0.0
    """Time of the training run, with features and evaluation, without the start of its processes."""
    images_per_second: float | None = None
    """Speed of the training loop in its last epoch."""
    utilisation: float | None = None
    """Share of the loop's time (0-1) in which rank 0 did not wait for data."""
    cost: float | None = None
    """Cost at `ladder.cost_per_hour` for each machine; None without a price."""
    speed_up: float | None = None
    """Time for one training image in the step before, divided by that in this step."""


class Ladder(Ref):
    """The steps in order, and the one to take next."""

    steps: tuple[StepResult, ...]
    advice: str
    """Which step to take next, and why."""
    table: str = Field("", repr=False)
    """The steps as a table for the terminal, and the advice."""


def plan_steps(config: LadderRun, train: TrainConfig, num_gpus: int, num_cores: int) -> list[Step]:
    """Return the six steps.

    Args:
        config: Parameters of the flow.
        train: Its training settings. With the recipe auto and pretrained weights, the head is trained.
        num_gpus: GPUs of this machine for a training run.
        num_cores: Its cores.
    """
    if train.recipe == "auto" and train.weights != "none":
        train = train.model_copy(update={"recipe": "head"})
    small = train.model_copy(update={"batch_size": SMALL_BATCH})
    large = train.model_copy(update={"dropout": DROPOUT if train.dropout is None else train.dropout})
    ranks, on_gpus = config.distributed, num_gpus > 0
    here = ranks.model_copy(
        update={"launcher": "local", "num_ranks": num_gpus if on_gpus else min(num_cores, max(2, ranks.num_ranks))}
    )
    alone = f"this machine has one {'GPU' if on_gpus else 'core'}" if here.num_ranks < 2 else ""
    elsewhere = ""
    if ranks.launcher == "local":
        elsewhere = (
            f"distributed.launcher is 'local', and spark.master '{config.spark.master}': name a cluster, and set the "
            "launcher to spark, or to hosts with distributed.hosts"
        )
    # With the seed of step 5 it would be the same training run, which is found and not repeated.
    other = large.model_copy(update={"seed": large.seed % (2**32 - 1) + 1})
    machines = max(2, len(ranks.hosts.split(","))) if ranks.launcher == "hosts" else ranks.num_ranks
    return [
        Step("a sample, without early stopping", small.model_copy(update={"patience": NO_STOPPING}), True),
        Step("early stopping", small, True),
        Step("a larger batch, with its rate and dropout", large, True),
        Step("all images, through petastorm", large),
        Step(f"{max(2, here.num_ranks)} ranks on this machine", large, distributed=here, left_out=alone),
        Step(f"ranks by the launcher {ranks.launcher}" if not elsewhere else "ranks on several machines",
             other, distributed=ranks, machines=machines, left_out=elsewhere),
    ]  # fmt: skip


def measure(
    step: Step, run: RunRef, storage: Storage, images: int, before: StepResult | None, cost_per_hour: float
) -> StepResult:
    """Return the figures of a step.

    Args:
        step: The step.
        run: Its training run.
        storage: Storage with the tracking URI.
        images: Images of the split `train`.
        before: The step before that was run.
        cost_per_hour: Price of one machine.
    """
    tested, metrics, seconds = evaluated_run(storage, run), run_metrics(storage, run), run_seconds(storage, run)
    waited = metrics.get("data_wait_share")
    speed_up = None
    if before is not None and before.seconds and seconds:
        speed_up = before.seconds / before.images / (seconds / images)
    return StepResult(
        name=step.name,
        images=images,
        ranks=step.distributed.num_ranks if step.distributed else 1,
        accuracy=tested.accuracy,
        interval=wilson_interval(tested.accuracy * tested.images, tested.images) if tested.images else None,
        seconds=seconds,
        images_per_second=metrics.get("images_per_second"),
        utilisation=None if waited is None else 1.0 - waited,
        cost=cost_per_hour * step.machines * seconds / 3600 if cost_per_hour else None,
        speed_up=speed_up,
    )


def advise(steps: Sequence[StepResult]) -> str:
    """Return which step to take next, and why."""
    last, sample, whole = [step for step in steps if not step.left_out][-1], steps[2], steps[3]
    sentence = ""
    if sample.interval and whole.interval:
        certain = "worth it" if whole.interval[0] > sample.accuracy else "not known to help"
        gain = 100 * (whole.accuracy - sample.accuracy)
        sentence = f"more images are {certain}: all of them gain {gain:+.1f} points over the sample; "
    number = steps.index(last) + 1
    if last is not whole and last.speed_up is not None and last.speed_up < EFFICIENT * last.ranks:
        slow = f"{last.ranks} ranks are {last.speed_up:.1f} times as fast, less than half of what they could be"
        return f"{sentence}stay at step 4: {slow}"
    if last is steps[-1]:
        return f"{sentence}stay at step 6, or give it more machines: its ranks are efficient"
    if last.seconds < WORTHWHILE:
        short = f"training takes {format_seconds(last.seconds)}, of which more hardware saves little"
        return f"{sentence}stay at step {number}: {short}"
    following = steps[number]
    return f"{sentence}take step {number + 1}, {following.name}; it was left out, since {following.left_out}"
