"""Steps of the scaling ladder: their settings, why they are left out, and the advice."""

import re

import pytest

from tasks.config.pipeline import LadderRun
from tasks.ladder.page import ladder_markdown, ladder_text
from tasks.ladder.steps import Ladder, StepResult, advise, plan_steps
from tasks.refs import CacheRef
from tasks.train.spec import run_key


def plan(gpus: int = 0, cores: int = 4, **settings: object):
    """Return the steps of a machine."""
    config = LadderRun.model_validate({"source": "/data/photos", **settings})
    return plan_steps(config, config.train, gpus, cores)


def test_steps_are_those_of_the_published_ladder() -> None:
    """Each changes one thing, and none is the training run of another one."""
    steps = plan(train={"patience": 2, "batch_size": 16})

    assert [step.on_sample for step in steps] == [True] * 3 + [False] * 3
    assert [step.train.batch_size for step in steps] == [2, 2, 16, 16, 16, 16]
    assert [step.train.patience for step in steps[:3]] == [10_000, 2, 2]
    assert [step.train.dropout for step in steps[:4]] == [None, None, 0.5, 0.5]
    assert {step.train.recipe for step in steps} == {"head"}
    keys = {run_key(step.train, CacheRef(url="", digest=str(step.on_sample)), step.distributed) for step in steps[:5]}
    assert len(keys) == 5
    assert [bool(step.left_out) for step in steps] == [False] * 5 + [True]


@pytest.mark.parametrize(
    ("gpus", "cores", "ranks", "reason"),
    [(0, 4, 2, ""), (0, 1, 1, "this machine has one core"), (1, 16, 1, "this machine has one GPU"), (4, 16, 4, "")],
)
def test_ranks_here_are_as_many_as_the_machine_has_devices(gpus: int, cores: int, ranks: int, reason: str) -> None:
    """Ranks that would share a device are left out."""
    step = plan(gpus, cores)[4]
    assert step.distributed is not None
    assert (step.distributed.num_ranks, step.left_out) == (ranks, reason)


def test_cluster_runs_the_last_step() -> None:
    """It is named by its hosts, or by a Spark master; without either, the way to it is said."""
    last = plan()[5]
    assert re.search(r"spark.master 'local\[\*\]': name a cluster, and set the launcher to spark", last.left_out)
    hosts = plan(distributed={"launcher": "hosts", "hosts": "a:2,b:2", "num_ranks": 4})[5]
    assert (hosts.left_out, hosts.machines) == ("", 2)
    spark = plan(distributed={"launcher": "spark", "num_ranks": 3}, spark={"master": "spark://node:7077"})
    assert (spark[5].left_out, spark[5].machines, spark[4].distributed.launcher) == ("", 3, "local")
    assert spark[5].train.seed != spark[4].train.seed, "the training run of step 5 would be found"


def test_network_from_scratch_keeps_its_recipe() -> None:
    """A head on random features would learn nothing."""
    assert {step.train.trained for step in plan(train={"weights": "none"})} == {"all"}


def results(seconds: list[float], accuracies: list[float], speed_ups: list[float | None], left: int = 1) -> Ladder:
    """Return a ladder whose last steps are left out."""
    steps = [
        StepResult(
            name=f"step {number}", images=1000, ranks=1 + (number >= 5), accuracy=accuracy,
            interval=(accuracy - 0.02, accuracy + 0.02), seconds=time, images_per_second=100.0, utilisation=0.9,
            cost=0.5, speed_up=speed_up,
        )
        for number, (time, accuracy, speed_up) in enumerate(zip(seconds, accuracies, speed_ups, strict=True), 1)
    ]  # fmt: skip
    steps += [StepResult(name="more", left_out="it is not here") for _ in range(left)]
    return Ladder(steps=tuple(steps), advice=advise(steps))


@pytest.mark.parametrize(
    ("ladder", "advice"),
    [
        (results([9.0] * 5, [0.8] * 3 + [0.9] * 2, [None, 1, 1, 1, 1.8]), r"worth it: .* \+10.0 points.*stay at"),
        (results([9.0] * 5, [0.8] * 5, [None, 1, 1, 1, 1.8]), r"not known to help.*stay at step 5: training takes 9 s"),
        (results([9e3] * 5, [0.8] * 5, [None, 1, 1, 1, 0.9]), r"stay at step 4: 2 ranks are 0.9 times as fast, less"),
        (results([9e3] * 5, [0.8] * 5, [None, 1, 1, 1, 1.8]), r"take step 6, more; .* since it is not here"),
        (results([9e3] * 4, [0.8] * 4, [None, 1, 1, 1], 2), r"take step 5, more; .* since it is not here"),
        (results([9e3] * 6, [0.8] * 6, [None, 1, 1, 1, 1.8, 1.9], 0), r"stay at step 6, or give it more machines"),
    ],
)  # fmt: skip
def test_advice_follows_from_the_figures(ladder: Ladder, advice: str) -> None:
    """More data where it gains more than chance, and more hardware where it is used and saves minutes."""
    assert re.search(advice, ladder.advice)


def test_table_has_every_step_and_the_reason_of_those_that_were_left_out() -> None:
    """In the terminal the columns are aligned; the page has the figure, too."""
    ladder = results([9.0] * 5, [0.8] * 5, [None, 1, 1, 1, 1.8])
    lines = ladder_text(ladder).splitlines()

    assert [line[:9].strip() for line in lines] == [
        *("step", "1. step 1", "2. step 2", "3. step 3", "4. step 4", "5. step 5", "6. more:", "next: mor"),
    ]
    assert lines[6] == "6. more: left out, since it is not here"
    assert lines[0].index("speed-up") == lines[5].index("1.80")
    assert "0.800 (0.780 to 0.820)" in lines[1]
    page = ladder_markdown(ladder)
    assert page.startswith("# Next: ")
    assert "![Time and accuracy](data:image/png;base64," in page
    assert page.count("\n|") >= 7
