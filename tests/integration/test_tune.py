"""The search in place with real ranks, and flows around a training run under Prefect's test harness."""

import json
from functools import partial
from pathlib import Path

import mlflow
import optuna
import pytest
from optuna.distributions import FloatDistribution
from optuna.trial import TrialState
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, FlowRunFilter

from flows.check_gradients import check_gradients
from flows.command_line import parse_arguments
from flows.etl import etl
from flows.overfit_batch import overfit_batch
from flows.repeat import repeat
from flows.tune import tune
from tasks.config.checks import GradientRun, OverfitRun, RepeatRun
from tasks.config.etl import EtlConfig, EtlRun
from tasks.config.storage import StorageConfig
from tasks.config.train import TrainConfig
from tasks.config.tune import Choices, Range, TuneConfig, TuneRun
from tasks.errors import WrongInput
from tasks.orchestration.stage import flow_run_tags
from tasks.refs import TrialReport
from tasks.tracking.searches import mark_pruned
from tasks.tracking.tracked_run import tracked_run
from tasks.tracking.trained import promotable_runs
from tasks.train.spec import TrainingSpec
from tasks.tune.search import TrialStart, TrialThread, search_parameters
from tasks.tune.space import study_name
from tasks.tune.study import NoTrialCompleted, open_study, trial_rows
from tasks.tune.task import search_best
from tasks.tune.trial import Pruned, run_trial
from tests.builders.hand_made_cache import hand_made_cache
from tests.builders.rank_errors import wait_after_an_epoch

SMALL = TrainConfig(
    recipe="given", model="squeezenet1_1", weights="none", freeze_backbone=False, batch_size=8, max_epochs=2, seed=3
)
RATES = {"learning_rate": Range(low=1e-8, high=2e-8, log=True)}


def test_search_on_the_command_line_replaces_the_default_search() -> None:
    """A given search space is not merged with the default one, which would be searched as well."""
    arguments = ["--tune.search", '{"optimizer": {"choices": ["adam", "sgd"]}}', "--tune.num_trials", "3"]

    tune = parse_arguments(TuneRun, "program", arguments).tune

    assert tune.space == {"optimizer": Choices(choices=["adam", "sgd"])}
    assert tune.num_trials == 3


def test_poor_trial_is_pruned_and_its_run_is_a_killed_child_of_the_search(source, storage, tmp_path):
    """A trial is pruned beside a trial with accuracy 1 from its first epoch, and its checkpoint is removed."""
    cache = hand_made_cache(source, f"{storage.cache}/by-hand")
    settings = TuneConfig(search=RATES, num_trials=2)
    study = open_study(storage, study_name(SMALL, settings, cache), SMALL, settings, create=True)
    study.add_trial(
        optuna.create_trial(
            state=TrialState.COMPLETE,
            value=1.0,
            params={"learning_rate": 1.5e-8},
            distributions={"learning_rate": FloatDistribution(1e-8, 2e-8, log=True)},
            intermediate_values={1: 1.0, 2: 1.0},
            system_attrs={"completed_rung_0": 1.0},
        )
    )
    # Else the rank trains on while the search decides, and may complete its second epoch on a busy machine.
    with wait_after_an_epoch(tmp_path / "site"):
        result = search_parameters(
            SMALL, settings, cache, storage, partial(TrialThread, num_slots=settings.parallel), {}
        )

    assert result.best == SMALL.model_copy(update={"learning_rate": 1.5e-8})
    assert [row["state"] for row in result.rows] == ["complete", "pruned"]
    client = mlflow.MlflowClient(tracking_uri=storage.tracking)
    trial, parent = client.get_run(result.rows[1]["run_id"]), client.get_run(result.run_id)
    assert (trial.info.status, trial.data.tags["lakevision.pruned"]) == ("KILLED", "true")
    assert trial.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert trial.info.run_name.startswith("squeezenet1_1 24 px, trial 1, from scratch, ")
    assert trial.data.tags["mlflow.source.name"] == "flows.tune"
    assert [metric.step for metric in client.get_metric_history(trial.info.run_id, "val_accuracy")] == [0]
    assert parent.info.status == "FINISHED"
    assert parent.data.metrics["best_val_accuracy"] == 1.0
    assert parent.data.tags["lakevision.best.learning_rate"] == "1.5e-08"
    assert list(storage.checkpoints.rglob("*.pt")) == []
    # A second search finds all trials done, in the same MLflow run.
    again = search_parameters(SMALL, settings, cache, storage, partial(TrialThread, num_slots=settings.parallel), {})
    assert (again.run_id, len(again.rows)) == (result.run_id, 2)


def test_trial_that_ends_by_early_stopping_is_not_pruned(source, storage):
    """A trial that could be pruned after its last epoch is tested, finishes, and has its best value."""
    cache = hand_made_cache(source, f"{storage.cache}/by-hand")
    train = SMALL.model_copy(update={"max_epochs": 4, "patience": 1})
    settings = TuneConfig(search=RATES, num_trials=2, min_epochs=2)
    study = open_study(storage, study_name(train, settings, cache), train, settings, create=True)
    study.add_trial(
        optuna.create_trial(
            state=TrialState.COMPLETE,
            value=1.0,
            params={"learning_rate": 1.5e-8},
            distributions={"learning_rate": FloatDistribution(1e-8, 2e-8, log=True)},
            intermediate_values={2: 1.0},
            system_attrs={"completed_rung_0": 1.0},
        )
    )
    result = search_parameters(train, settings, cache, storage, partial(TrialThread, num_slots=1), {})

    assert sorted(study.trials[1].intermediate_values) == [1, 2]
    assert result.rows[1]["state"] == "complete"
    trial = mlflow.MlflowClient(tracking_uri=storage.tracking).get_run(result.rows[1]["run_id"])
    assert trial.info.status == "FINISHED"
    assert result.rows[1]["value"] == trial.data.metrics["best_val_accuracy"]


def test_trial_that_finished_before_the_pruning_signal_stays_finished(storage, monkeypatch):
    """A trial that finishes before the signal of its pruning arrives keeps its value."""
    settings = TuneConfig(search=RATES)
    study = open_study(storage, "study", SMALL, settings, create=True)
    study.ask({})
    spec = TrainingSpec(train=SMALL, distributed=None, cache={"url": "cache", "digest": "digest"}, storage=storage)

    def finish_and_raise_pruned(*_args: object) -> None:
        with tracked_run(storage, "trial", spec.key, {}, {}, None) as run:
            run.log_metrics({"best_val_accuracy": 0.25}, step=0)
        raise Pruned

    monkeypatch.setattr("tasks.tune.trial.launch_ranks", finish_and_raise_pruned)
    report = run_trial(spec, "study", 0, settings)

    assert report == TrialReport(number=0, state="complete", value=0.25, run_id=report.run_id)
    assert study.trials[0].state == TrialState.COMPLETE
    assert mark_pruned(storage, spec.key) == report.run_id
    assert mlflow.MlflowClient(tracking_uri=storage.tracking).get_run(report.run_id).info.status == "FINISHED"


@pytest.mark.usefixtures("prefect_harness")
def test_search_whose_trials_all_diverge_fails_once(source, storage):
    """Each trial counts as pruned without a value and names its MLflow run; the task is not retried."""
    cache = hand_made_cache(source, f"{storage.cache}/by-hand")
    settings = TuneConfig(search={"learning_rate": Choices(choices=[9.0, 10.0])}, num_trials=2, where="in_place")
    flow_runs = []

    @flow
    def only_search() -> None:
        flow_runs.append(flow_run_tags()["prefect.flow_run_id"])
        search_best(SMALL, settings, cache, storage)

    with pytest.raises(NoTrialCompleted, match=r"\(2 diverged .* trial 1 .*train.learning_rate, "):
        only_search()

    with get_client(sync_client=True) as client:
        chosen = FlowRunFilter.model_validate({"id": {"any_": flow_runs}})
        (searched,) = client.read_task_runs(flow_run_filter=chosen)
        assert (searched.state.name, searched.run_count) == ("Failed", 1)
    study = open_study(storage, study_name(SMALL, settings, cache), SMALL, settings, create=False)
    mlflow_client = mlflow.MlflowClient(tracking_uri=storage.tracking)
    for row in trial_rows(study):
        assert (row["state"], row["value"]) == ("pruned", None)
        run = mlflow_client.get_run(row["run_id"])
        assert (run.info.status, run.data.tags["lakevision.trial"]) == ("FAILED", str(row["number"]))
        assert run.data.params["train.learning_rate"] == str(row["train.learning_rate"])
    assert list(storage.checkpoints.rglob("*.pt")) == []


def test_default_search_draws_batch_sizes_that_fit_the_split(cache, storage):
    """With 39 images the batch sizes are at most 32; a given batch size of 40 is rejected before the first trial."""
    drawn = []

    class FakeTrial:
        def __init__(self, start: TrialStart) -> None:
            drawn.append(start.spec.train.batch_size)
            study = open_study(storage, start.study, start.spec.train, start.tune, create=False)
            study.tell(start.number, 1 / drawn[-1])

        def poll(self) -> bool:
            return True

        def cancel(self) -> None:
            raise AssertionError

        def join(self) -> None:
            raise AssertionError

    too_large = TuneConfig(search={"batch_size": Choices(choices=[8, 40])})
    with pytest.raises(WrongInput, match="tune.search can draw {'batch_size': 40}, .* 39 "):
        search_parameters(SMALL, too_large, cache, storage, FakeTrial, {})
    assert drawn == []
    assert not (Path(storage.home) / "studies").exists()

    result = search_parameters(SMALL, TuneConfig(num_trials=12), cache, storage, FakeTrial, {})

    assert set(drawn) == {8, 16, 32}
    assert (result.best.batch_size, len(result.rows)) == (8, 12)


@pytest.mark.usefixtures("prefect_harness")
def test_flows_around_a_training_run(spark, storage, source):
    """Sanity checks pass, the best trial of a search is not trained again, and a repeated run has equal weights."""
    home = StorageConfig(home=storage.home)
    etl(EtlRun(storage=home, etl=EtlConfig(source=str(source), val_fraction=0.2, test_fraction=0.2)))
    common = {"storage": home, "cache": {"image_size": 24}, "train": SMALL.model_copy(update={"max_epochs": 1})}
    few = {"overfit": {"max_steps": 80, "target_loss_ratio": 0.5}}
    assert len(overfit_batch(OverfitRun.model_validate(common | few)).losses) > 1
    assert check_gradients(GradientRun.model_validate(common)).parameters

    search = TuneConfig(search={"learning_rate": Choices(choices=[0.001, 0.002])}, num_trials=1, where="in_place")
    best = tune(TuneRun.model_validate(common | {"tune": search}))
    report = repeat(RepeatRun(storage=home))

    assert report.repeat_of == best.run_id != report.run_id
    assert report.weights_equal
    assert report.metrics_agree
    assert {pair.metric for pair in report.metrics} >= {"val_loss", "test_accuracy", "test_loss"}
    assert report.differences == []
    assert len(promotable_runs(storage)) == 2
    with pytest.raises(WrongInput, match="run_id is 'none', which '.*' does not have"):
        repeat(RepeatRun(storage=home, run_id="none"))
    with get_client(sync_client=True) as client:
        wanted = ArtifactFilter.model_validate(
            {"key": {"any_": ["tune-trials", "tune-best", "repeat-comparison", "gradients"]}}
        )
        found = {artifact.key: str(artifact.data) for artifact in client.read_artifacts(artifact_filter=wanted)}
    assert f'"run_id": "{best.run_id}"' in found["tune-trials"]
    trained = mlflow.MlflowClient(tracking_uri=storage.tracking).get_run(best.run_id).data
    assert json.loads(found["tune-best"]) == [
        {"setting": "train.learning_rate", "value": float(trained.params["train.learning_rate"])},
        {"setting": "val_accuracy", "value": trained.metrics["val_accuracy"]},
    ]
    assert '"agrees": true' in found["repeat-comparison"]
    assert '"finite": true' in found["gradients"]
