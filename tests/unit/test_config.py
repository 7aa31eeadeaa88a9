"""Models of the settings: defaults, bounds, and rules across fields."""

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from tasks.config.cache import CacheConfig, CacheRun
from tasks.config.checks import RepeatRun
from tasks.config.distributed import DistributedConfig, TrainDistributedRun
from tasks.config.etl import BUILTIN_DIGITS, EtlConfig
from tasks.config.frozen import FrozenConfig
from tasks.config.maintenance import MaintainConfig
from tasks.config.pipeline import PipelineConfig
from tasks.config.prediction import PredictConfig, PromoteRun, StreamRun
from tasks.config.promotion import PromoteConfig
from tasks.config.storage import SparkConfig, StorageConfig
from tasks.config.train import TrainConfig
from tasks.config.tune import TuneConfig
from tasks.errors import explain
from tests.builders.settings_models import all_models

MODELS = all_models()


def test_defaults_are_complete() -> None:
    """The DAG runs without any setting: on the built-in digits, local Spark, and local folders."""
    pipeline = PipelineConfig()

    assert pipeline.etl.source == BUILTIN_DIGITS
    assert pipeline.spark.master == "local[*]"
    assert set(pipeline.storage.model_dump().values()) == {None}


def test_configuration_survives_a_json_round_trip() -> None:
    """A worker reads from JSON the same configuration that Prefect stored."""
    given = PipelineConfig(train=TrainConfig(model="resnet18", seed=7), spark=SparkConfig(conf={"spark.x": "1"}))

    assert PipelineConfig.model_validate_json(given.model_dump_json()) == given


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_unknown_names_are_refused(model: type[BaseModel]) -> None:
    """A misspelled setting is refused and never ignored."""
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        model.model_validate({"no_such_setting": 1})


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_every_setting_has_a_description(model: type[BaseModel]) -> None:
    """Prefect's form shows a description for each field, and for a group its docstring."""
    for name, field in model.model_fields.items():
        is_group = isinstance(field.annotation, type) and issubclass(field.annotation, FrozenConfig)
        assert field.description or is_group, f"{model.__name__}.{name}"
    assert model.__doc__


@pytest.mark.parametrize("model", [model for model in MODELS if "timeout_seconds" in model.model_fields])
def test_time_limit_of_a_stage_is_described_as_final(model: type[BaseModel]) -> None:
    """The form says what `is_retried` does: an attempt that took too long would again."""
    described = str(model.model_fields["timeout_seconds"].description)
    assert "retried twice" not in described
    assert "not retried" in described or model in (TrainConfig, TuneConfig)  # which stop training in a valid state


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_every_model_has_a_schema(model: type[BaseModel]) -> None:
    """Every model has a JSON schema, from which Prefect renders its form, without additional properties."""
    assert model.model_json_schema()["additionalProperties"] is False


def test_settings_are_immutable() -> None:
    """A setting cannot be assigned after validation."""
    with pytest.raises(ValidationError, match="frozen"):
        EtlConfig().stored_side = 1  # type: ignore[misc]  # the assignment is expected to be refused


@pytest.mark.parametrize(
    ("model", "values"),
    [
        (SparkConfig, {"driver_memory": "3 GB"}),
        (EtlConfig, {"source": ""}),
        (EtlConfig, {"stored_side": 15}),
        (EtlConfig, {"stored_side": 16385}),
        (EtlConfig, {"val_fraction": -0.1}),
        (EtlConfig, {"test_fraction": 1.0}),
        (EtlConfig, {"max_bad_fraction": 1.1}),
        (EtlConfig, {"max_pixels": 1}),
        (EtlConfig, {"min_side": 0}),
        (EtlConfig, {"min_images_per_class": -1}),
        (EtlConfig, {"near_duplicate_bits": 9}),
        (EtlConfig, {"split_by": "chance"}),
        (EtlConfig, {"deleted": "forget"}),
        (CacheConfig, {"image_size": 15}),
        (CacheConfig, {"image_size": 1025}),
        (CacheConfig, {"row_group_megabytes": 0}),
        (CacheConfig, {"format": "png"}),
        (CacheConfig, {"jpeg_quality": 49}),
        (CacheConfig, {"keep_days": -1}),
        (CacheConfig, {"keep_gigabytes": 0}),
        (TrainConfig, {"learning_rate": 0.0}),
        (TrainConfig, {"learning_rate": float("nan")}),
        (TrainConfig, {"batch_size": 0}),
        (TrainConfig, {"max_epochs": 0}),
        (TrainConfig, {"warmup_epochs": -0.5}),
        (TrainConfig, {"warmup_epochs": float("inf")}),
        (TrainConfig, {"patience": 0}),
        (TrainConfig, {"monitor": "train_loss"}),
        (TrainConfig, {"device": "tpu"}),
        (TrainConfig, {"seed": 0}),
        (DistributedConfig, {"num_ranks": 0}),
        (DistributedConfig, {"deployment": "no-slash"}),
        (DistributedConfig, {"stall_timeout_seconds": 9}),
        (TrainConfig, {"stall_timeout_seconds": 9}),
        (DistributedConfig, {"max_restarts": -1}),
        (DistributedConfig, {"min_ranks": 0}),
        (DistributedConfig, {"backend": "mpi"}),
        (DistributedConfig, {"gradient_compression": "int8"}),
        (PromoteConfig, {"model_name": "a/b"}),
        (PromoteConfig, {"min_test_accuracy": 1.5}),
        (PredictConfig, {"alias": "best one"}),
        (PredictConfig, {"batch_size": 0}),
        (PredictConfig, {"table_version": -1}),
        (PredictConfig, {"source": "s3a://key:secret@bucket/x"}),
        (TrainConfig, {"num_threads": 10**12}),
        (TrainConfig, {"environment": ["NAME=value"]}),
        (TrainConfig, {"environment": ["MY_NAME", "MLFLOW_RUN_ID"]}),
        (TrainConfig, {"timeout_seconds": 10**30}),
        (TrainConfig, {"timeout_seconds": 10**10}),
        (TrainConfig, {"max_seconds": 10**12}),
        (TrainConfig, {"patience": 10**30}),
        (TrainConfig, {"min_delta": float("inf")}),
        (TrainConfig, {"max_gradient_norm": float("inf")}),
        (TrainConfig, {"max_gradient_norm": float("nan")}),
        (DistributedConfig, {"submit_timeout_seconds": 10**12}),
        (DistributedConfig, {"run_timeout_seconds": 10**30}),
        (DistributedConfig, {"stall_timeout_seconds": 10**12}),
        (TuneConfig, {"timeout_seconds": 10**12}),
        (EtlConfig, {"timeout_seconds": 0}),
        (CacheConfig, {"timeout_seconds": 10**10}),
        (PredictConfig, {"timeout_seconds": 0}),
        (PromoteConfig, {"timeout_seconds": 10**10}),
        (MaintainConfig, {"timeout_seconds": 0}),
        (TuneConfig, {"seed": 2**32}),
        (MaintainConfig, {"vacuum_hours": 10**12}),
        (EtlConfig, {"min_images_per_class": 10**30}),
        (EtlConfig, {"split_seed": 10**30}),
        (CacheRun, {"table_version": 10**30}),
        (RepeatRun, {"run_id": "' or '1' = '1"}),
    ],
)
def test_invalid_value_is_refused(model: type[BaseModel], values: dict[str, Any]) -> None:
    """A value outside the bounds or choices is refused, and no other setting is reported."""
    with pytest.raises(ValidationError) as refused:
        model.model_validate(values)
    # A field with alternatives has an error for each of them.
    assert {error["loc"][:1] for error in refused.value.errors()} == {(name,) for name in values}


def test_more_ranks_at_least_than_at_all_are_refused() -> None:
    """The sentence has both values; as many ranks are accepted."""
    with pytest.raises(ValidationError, match="min_ranks is 3 and num_ranks 2: give at most"):
        DistributedConfig(num_ranks=2, min_ranks=3, max_restarts=1)
    assert DistributedConfig(num_ranks=2, min_ranks=2, max_restarts=1).min_ranks == 2


@pytest.mark.parametrize(("val", "test"), [(0.5, 0.5), (0.9, 0.2)])
def test_splits_that_leave_nothing_to_train_on_are_refused(val: float, test: float) -> None:
    """Two fractions that are each valid are refused if their sum is 1 or more."""
    with pytest.raises(ValidationError, match="leave nothing to train on"):
        EtlConfig(val_fraction=val, test_fraction=test)


def test_files_and_a_table_are_not_predicted_together() -> None:
    """`predict.source` excludes a table and its version; an empty name is none."""
    with pytest.raises(ValidationError, match="source is '/a' and table is '/b'"):
        PredictConfig(source="/a", table="/b")
    with pytest.raises(ValidationError, match="source is '/a' and table_version is '0'"):
        PredictConfig(source="/a", table_version=0)

    assert PredictConfig(source="/a", table="").source == "/a"
    assert PredictConfig(source="", table="/b", table_version=0).table_version == 0


def test_dag_predicts_the_version_that_it_ingests() -> None:
    """A pinned version needs the name of another table."""
    with pytest.raises(ValidationError, match="predict.table_version is 3, but the DAG"):
        PipelineConfig(predict=PredictConfig(table_version=3))

    assert PipelineConfig(predict=PredictConfig(table="/b", table_version=3)).predict.table_version == 3


def test_stream_reads_a_table_or_a_source_as_it_is_now() -> None:
    """A stream has no version of a table to begin with; a source may be given as for batch inference."""
    with pytest.raises(ValidationError, match="predict.table_version is 3, but a stream"):
        StreamRun(predict=PredictConfig(table_version=3))
    assert StreamRun.model_validate({"source": "/a"}).predict.source == "/a"


@pytest.mark.parametrize(
    ("train_on", "single", "distributed"),
    [("single", True, False), ("distributed", False, True), ("both", True, True)],
)
def test_dag_trains_as_chosen(train_on: str, *, single: bool, distributed: bool) -> None:
    """The DAG trains once by default, in one process; ranks count only where it trains with them."""
    config = PipelineConfig.model_validate({"train_on": train_on})

    assert (config.trains_single, config.trains_distributed) == (single, distributed)
    assert config.ranks == (config.distributed if distributed else None)
    assert PipelineConfig().train_on == "single"
    assert PipelineConfig().single.where == "in_place"
    assert "`single`" in PipelineConfig.model_json_schema()["properties"]["train_on"]["description"]


def test_frozen_backbone_without_weights_is_refused() -> None:
    """A new head on random features is refused, and each way out that the message names is accepted."""
    with pytest.raises(ValidationError, match="set freeze_backbone to false, or weights to"):
        TrainConfig(weights="none", freeze_backbone=True)
    for recipe in ("head", "finetune"):
        with pytest.raises(ValidationError, match=f"the recipe is '{recipe}' with weights 'none'"):
            TrainConfig(weights="none", recipe=recipe)

    assert TrainConfig(weights="none", freeze_backbone=False).trained == "all"
    assert TrainConfig(weights="none").trained == TrainConfig(weights="none", recipe="scratch").trained == "all"
    assert TrainConfig(weights="/x.pt", freeze_backbone=True).trained == "head"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"recipe": "scratch", "freeze_backbone": True}, "the recipe is 'scratch', which trains all layers"),
        ({"recipe": "finetune", "freeze_backbone": True}, "the recipe is 'finetune', which trains all layers"),
        ({"recipe": "head", "fine_tune": [{"unfreeze_from": "all"}]}, "fine_tune has 1 phases, but the recipe is"),
    ],
)
def test_settings_that_contradict_the_recipe_are_refused(settings: dict[str, Any], message: str) -> None:
    """A setting wins over what the recipe leaves open, and not over what it is."""
    with pytest.raises(ValidationError, match=message):
        TrainConfig.model_validate(settings)


@pytest.mark.parametrize(("name", "value"), [("scale_learning_rate", "sqrt"), ("warmup_epochs", 1.0)])
def test_former_settings_of_ranks_are_refused_with_the_new_ones(name: str, value: str | float) -> None:
    """Scaling and warm-up are settings of `train`, for any number of ranks."""
    with pytest.raises(ValidationError, match=f"{name} of distributed moved to train.{name}"):
        DistributedConfig.model_validate({"num_ranks": 2, name: value})

    assert getattr(TrainConfig.model_validate({name: value}), name) == value


def test_format_of_gradients_that_the_backend_cannot_send_is_refused() -> None:
    """Horovod cannot send bfloat16, and each way out that the message names is accepted."""
    with pytest.raises(ValidationError, match="bfloat16: set backend to torch"):
        DistributedConfig(gradient_compression="bf16", backend="horovod")

    assert DistributedConfig(gradient_compression="bf16", backend="torch").backend == "torch"
    assert DistributedConfig(gradient_compression="bf16").backend == "auto"
    assert DistributedConfig(gradient_compression="fp16", backend="horovod").backend == "horovod"


def test_fewer_ranks_with_synchronized_batch_norm_are_refused() -> None:
    """The ranks that are left cannot pass the batches of the others at once."""
    with pytest.raises(ValidationError, match="batch norm of fewer than 4 ranks"):
        DistributedConfig(num_ranks=4, min_ranks=2, max_restarts=1, sync_batch_norm=True)

    assert DistributedConfig(num_ranks=4, min_ranks=4, max_restarts=1, sync_batch_norm=True).sync_batch_norm


def test_compiled_network_with_synchronized_batch_norm_is_refused() -> None:
    """The DAG refuses it only if it trains with ranks."""
    given = {"train": {"compile": True}, "distributed": {"sync_batch_norm": True}}
    for model, values in ((TrainDistributedRun, given), (PipelineConfig, given | {"train_on": "both"})):
        with pytest.raises(ValidationError, match="train.compile and distributed.sync_batch_norm"):
            model.model_validate(values)

    assert PipelineConfig.model_validate(given | {"train_on": "single"}).train.compile


def test_warmup_before_one_cycle_is_refused() -> None:
    """The schedule one_cycle accepts only None or 0 warm-up epochs; other schedules accept any."""
    with pytest.raises(ValidationError, match="schedule is 'one_cycle', .* warmup_epochs is 2"):
        TrainConfig(schedule="one_cycle", warmup_epochs=2.0)

    assert TrainConfig(schedule="one_cycle").warmup_epochs is None
    assert TrainConfig(schedule="one_cycle", warmup_epochs=0.0).warmup_epochs == 0.0
    assert TrainConfig(schedule="cosine", warmup_epochs=2.0).warmup_epochs == 2.0


def test_storage_location_can_be_a_url() -> None:
    """A storage location may be in an object store."""
    assert StorageConfig(tables="s3a://bucket/tables").tables == "s3a://bucket/tables"


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            {"promote": {"model_name": "it's"}},
            "promote.model_name: it is 'it's', which is not a name for a registered model",
        ),
        (
            {"promote": {"model_name": ".."}},
            "promote.model_name: it is '..', which is not a name for a registered model",
        ),
        ({"promote": {"model_name": "a/.."}}, "promote.model_name: it is 'a/..', which is not a name"),
        ({"promote": {"model_name": "m" * 300}}, "which is not a name for a registered model: use at most 250 letters"),
        ({"promote": {"model_name": "lakevision "}}, "not ending with a space or dot"),
        (
            {"spark": {"driver_memory": "0g"}},
            "spark.driver_memory: it is '0g', with which Spark cannot run: give 512m to 16t",
        ),
        ({"spark": {"driver_memory": "1k"}}, "with which Spark cannot run"),
        ({"spark": {"driver_memory": "99999999t"}}, "with which Spark cannot run"),
        ({"spark": {"driver_memory": "9" * 5000 + "g"}}, "which is not a size of memory"),
        ({"spark": {"driver_memory": "٣g"}}, "which is not a size of memory: write a number with k, m, g or t, as 3g"),
        (
            {"spark": {"master": "everywhere"}},
            "spark.master: it is 'everywhere', which is not a Spark master: give local[*]",
        ),
        ({"spark": {"master": "local[0]"}}, "which has 0 threads: give 1 to 4096, or *"),
        ({"spark": {"master": "local[99999999]"}}, "which has 99999999 threads"),
        ({"spark": {"master": "spark://"}}, "which is not a Spark master"),
        ({"spark": {"master": "local[\u0664]"}}, "which is not a Spark master"),
        ({"spark": {"master": "local[4,\u0663]"}}, "which is not a Spark master"),
        ({"spark": {"master": "local-cluster[\u0664,1,1024]"}}, "which is not a Spark master"),
        ({"spark": {"master": "spark://h:99999"}}, "which is not a Spark master"),
        ({"spark": {"master": "spark://h:65536,h2"}}, "which is not a Spark master"),
        ({"spark": {"master": "k8s://x"}}, "which is not a Spark master"),
        ({"spark": {"master": "k8s://https://h:0"}}, "which is not a Spark master"),
        (
            {"storage": {"home": "/data/a\0b"}},
            r"storage.home: it is '/data/a\x00b', which has the control character '\x00'",
        ),
        ({"storage": {"tables": "/data/a\0b"}}, "storage.tables: it is"),
        (
            {"etl": {"source": "/data/a\nb"}},
            r"etl.source: it is '/data/a\nb', which has the control character '\n' in it",
        ),
        (
            {"train": {"weights": "/data/\x1b[31m"}},
            r"train.weights: it is '/data/\x1b[31m', which has the control character",
        ),
        ({"storage": {"home": "/" + "a" * 5000}}, "storage.home: it has 5,001 characters: give at most 4,096"),
        (
            {"spark": {"conf": {"spark.x": "a\nspark.y=z"}}},
            "spark.conf: it is 'a\\nspark.y=z', which has the control character",
        ),
        ({"train": {"learning_rate": float("inf")}}, "train.learning_rate is inf: input should be a finite number"),
        ({"train": {"seed": 10**5000}}, "train.seed is a number of more than 200 digits"),
    ],
)
def test_hostile_value_is_refused_in_one_line(values: dict[str, Any], sentence: str) -> None:
    """The message has the setting, its value and the way out, before any work starts."""
    with pytest.raises(ValidationError) as refused:
        PipelineConfig.model_validate(values)

    assert sentence in explain(refused.value)
    assert "\n" not in explain(refused.value)


@pytest.mark.parametrize(
    "master",
    [
        "local",
        "local[*]",
        "local[4]",
        "local[*,3]",
        "local-cluster[2,1,1024]",
        "spark://h:7077,h2:7077",
        "yarn",
        "k8s://https://h:443",
        "k8s://h:6443",
        "k8s://https://rancher.example/k8s/clusters/c-1",
        "k8s://https://[::1]:443",
        "spark://h:65535",
    ],
)
def test_valid_spark_master_is_accepted(master: str) -> None:
    """Local masters and those of every cluster manager are accepted."""
    assert SparkConfig(master=master).master == master


@pytest.mark.parametrize("name", ["lakevision", "my-model_v2.1", "Bonsai (small)", "größe", "a"])
def test_ordinary_model_name_is_accepted(name: str) -> None:
    """Letters of any language and the punctuation of file names are accepted."""
    assert PromoteConfig(model_name=name).model_name == name


def test_reason_for_a_promotion_is_about_a_single_run() -> None:
    """The best of several runs, or of those on a table, is not known yet."""
    for run_ids in ([], ["a" * 32, "b" * 32]):
        with pytest.raises(ValidationError, match=f"run_ids has {len(run_ids)} runs: give the one"):
            PromoteRun.model_validate({"reason": "its disk was lost", "run_ids": run_ids})

    assert PromoteRun.model_validate({"reason": "its disk was lost", "run_ids": ["a" * 32]}).reason
    assert PromoteRun.model_validate({"run_ids": ["a" * 32, "b" * 32]}).reason == ""
