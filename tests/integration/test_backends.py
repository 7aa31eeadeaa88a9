"""Ranks of Horovod and of torch's DistributedDataParallel equal one process with the same global batches."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache as cache_results
from typing import Any

import pytest
import torch

from tasks.collectives.reducer import Reducer
from tasks.config.distributed import DistributedConfig
from tasks.launch.launcher import launch_ranks
from tasks.train.run import train_model
from tasks.train.spec import TrainingSpec
from tests.builders.rank_cases import BACKENDS, CASES, Case, run_case, start_ranks
from tests.fakes.interrupted_training import logged_metrics, make_workspace

pytestmark = pytest.mark.timeout(600)

Results = dict[str, list[dict[str, Any]]]
"""Results by case, for each backend and rank."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Results]:
    """Return a function that trains all cases, once per number of ranks."""

    @cache_results
    def train(num_ranks: int) -> Results:
        return start_ranks(num_ranks, tmp_path_factory.mktemp("ranks") / str(num_ranks))

    return train


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], dict[str, Any]]:
    """Return a function that trains a case in this process, with the batches of so many ranks."""

    @cache_results
    def train(name: str, num_ranks: int) -> dict[str, Any]:
        uninterrupted = replace(CASES.get(name, Case()), interrupt_at=None)
        return run_case(uninterrupted, Reducer(), num_ranks, tmp_path_factory.mktemp("alone"))

    return train


@pytest.mark.parametrize("name", [*CASES, "resumed_elsewhere"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.long)])
def test_ranks_equal_one_process(trained, alone, num_ranks: int, backend: str, name: str) -> None:
    """With none to n + 1 rows per rank and step, weights, losses and errors are those of one process."""
    expected = alone(name, num_ranks)
    for found in (results[name] for results in trained(num_ranks)[backend]):
        if name == "diverged":
            assert found["message"].startswith("the training loss of epoch 0, step ")
            assert found["message"] == expected["message"]
            assert set(found["rows"]) <= set(expected["rows"])
            assert CASES[name].non_finite_row in found["rows"]
            continue
        assert found["state"].keys() == expected["state"].keys()
        torch.testing.assert_close(found["state"], expected["state"], rtol=1e-9, atol=1e-11)
        assert len(found["history"]) == len(expected["history"])
        for epoch, expected_epoch in zip(found["history"], expected["history"], strict=True):
            assert epoch == pytest.approx(expected_epoch, rel=1e-9)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_all_ranks_have_the_same_weights(trained, num_ranks: int, backend: str) -> None:
    """After every case the weights of all ranks are bit-identical."""
    first, *others = trained(num_ranks)[backend]
    for name, result in first.items():
        for other in others:
            assert result.keys() == other[name].keys()
            for key, value in result.get("state", {}).items():
                assert torch.equal(value, other[name]["state"][key]), (name, key)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rank_that_waits_in_its_backward_pass_is_not_taken_for_stuck(trained, backend: str) -> None:
    """Its activity changes to waiting for ranks, for which the watchdog does not blame it, and back to the step."""
    kinds = trained(2)[backend][0]["waiting"]["kinds"]
    assert "ranks" in kinds[:-1]
    assert kinds[-1] == "step"


@pytest.mark.parametrize(
    ("backend", "sent"), [("horovod", torch.float16), ("torch", torch.float16), ("torch", torch.bfloat16)]
)
def test_compressed_gradients_are_rounded(trained, alone, backend: str, sent: torch.dtype) -> None:
    """Gradients sent as float16 or bfloat16 give nearly the weights of uncompressed ones."""
    exact = alone("plain", 2)["state"]
    for results in trained(2)[backend]:
        found = results[f"compressed as {sent}"]["state"]
        torch.testing.assert_close(found, exact, rtol=0.02, atol=0.002)
        assert not all(torch.allclose(found[name], value, rtol=1e-9) for name, value in exact.items())


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_rank_equals_one_process_in_every_bit(trained, alone, backend: str) -> None:
    """The backends' own averaging over a single rank changes no bit of weights and losses."""
    (results,) = trained(1)[backend]
    for name in sorted(CASES.keys() - {"diverged", "synchronized", "accumulated_synchronized"}):
        expected = alone(name, 1)
        assert results[name]["history"] == expected["history"], name
        for key, value in expected["state"].items():
            assert torch.equal(results[name]["state"][key], value), (name, key)


@pytest.mark.long
def test_torch_ranks_train_features_and_phases_as_one_process(tmp_path, empty_tracking) -> None:
    """The head on cached features, then all layers with synchronized batch norm and averaged weights."""
    workspace = make_workspace(tmp_path, empty_tracking)
    train = workspace.settings(
        batch_size=3,
        max_epochs=1,
        optimizer="sgd",
        learning_rate=0.02,
        precision="fp32",
        ema_decay=0.5,
        fine_tune=[{"unfreeze_from": "conv5", "learning_rate": 0.02, "max_epochs": 2}],
    )
    distributed = DistributedConfig(num_ranks=2, backend="torch", sync_batch_norm=True)
    run = launch_ranks(
        TrainingSpec(train=train, distributed=distributed, cache=workspace.cache, storage=workspace.interrupted)
    )

    single = train.model_copy(update={"batch_size": 6})
    alone = train_model(TrainingSpec(train=single, cache=workspace.cache, storage=workspace.uninterrupted))
    found, expected = logged_metrics(workspace.interrupted, run), logged_metrics(workspace.uninterrupted, alone)
    for name in ("train_loss", "val_loss", "learning_rate", "gradient_norm", "test_loss"):
        assert dict(found[name]) == pytest.approx(dict(expected[name]), rel=1e-3), name  # by step
    assert len(found["val_loss"]) == 3
