"""One model a flow: the parameters it takes, in the order of the data."""

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import BaseModel, Field, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema

from tasks.config.data import CacheConfig, EtlConfig, MaintainConfig
from tasks.config.form import Schema, always, first_screen, must_be, must_be_said, unless_given, when
from tasks.config.model import DistributedConfig, PredictConfig, PromoteConfig
from tasks.config.storage import Settings, SparkConfig, StorageConfig
from tasks.config.train import TrainConfig
from tasks.config.values import RunId, TableVersion


class Run(Settings):
    """What a flow takes: groups of settings, of which those in `first` may be given without their group's name."""

    first: ClassVar[Mapping[str, tuple[str, str]]] = {}
    """Settings that most users change, by the name they have in the form, with their group and their name in it."""

    required: ClassVar[tuple[str, str] | None] = None
    """The one of them that a deployment's run has to name, and what it is: nobody would mean the default."""

    @model_validator(mode="before")
    @classmethod
    def _put_into_groups(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        placed = dict(values)
        for name, (group, field) in cls.first.items():
            given, settings = placed.pop(name, None), placed.get(group, {})
            if isinstance(settings, BaseModel):
                settings = settings.model_dump(exclude_unset=True)
            if given is None or not isinstance(settings, Mapping):
                continue
            if settings.get(field, given) != given:
                raise ValueError(f"{name} and {group}.{field} are the same setting and differ: leave one of them out")
            placed[group] = {**settings, field: given}
        return placed

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Return what the flow's form shows: what most users change, and the groups, which lie folded below it."""
        reference = super().__get_pydantic_json_schema__(core_schema, handler)
        schema = handler.resolve_ref_schema(reference)
        properties: dict[str, Schema] = schema["properties"]
        groups = {name: handler.resolve_ref_schema(group) for name, group in properties.items() if "$ref" in group}
        schema["properties"] = first_screen(properties, groups, cls.first, cls.required or ())
        if cls.required:
            name, what = cls.required
            schema.update(must_be_said(name, what, *cls.first[name]))
        return reference


SOURCE = {"source": ("etl", "source")}
NETWORK = {
    "model": ("train", "model"),
    "weights": ("train", "weights"),
    "freeze_backbone": ("train", "freeze_backbone"),
}
IMAGE_SIZE = {"image_size": ("cache", "image_size")}
TABLES = {"tables": ("storage", "tables")}
MODEL_NAME = {"model_name": ("promote", "model_name")}
DEVICE_AND_EPOCHS = {"device": ("train", "device"), "max_epochs": ("train", "max_epochs")}

NETWORK_RULES: tuple[Schema, ...] = (
    unless_given("train", "freeze_backbone", when("weights", "none", must_be("freeze_backbone", False))),
    when("freeze_backbone", False, {"properties": {"train": {"properties": {"fine_tune": {"maxItems": 0}}}}}),
)
"""Those of TrainConfig between what is shown first and what lies in the group."""

A_FOLDER = ("source", "your folder of class folders, or builtin:digits")


class SparkRun(Run):
    """What every flow that runs Spark takes."""

    storage: StorageConfig = StorageConfig()
    spark: SparkConfig = SparkConfig()


class EtlRun(SparkRun):
    """Parameters of the flow `etl`."""

    first = SOURCE | TABLES
    required = A_FOLDER

    etl: EtlConfig = EtlConfig()


class CacheRun(SparkRun):
    """Parameters of the flow `cache`."""

    first = IMAGE_SIZE

    cache: CacheConfig = CacheConfig()
    table_version: TableVersion | None = Field(None, description="Version of the table `images`; empty: the latest")


class TrainRun(CacheRun):
    """Parameters of the flow `train`."""

    first = NETWORK | IMAGE_SIZE | DEVICE_AND_EPOCHS
    rules: ClassVar[tuple[Schema, ...]] = NETWORK_RULES

    train: TrainConfig = TrainConfig()


class TrainDistributedRun(TrainRun):
    """Parameters of the flow `train-distributed`, which runs the ranks where it runs itself."""

    first = NETWORK | IMAGE_SIZE | {"num_ranks": ("distributed", "num_ranks")} | DEVICE_AND_EPOCHS

    distributed: DistributedConfig = DistributedConfig()


class RepeatRun(SparkRun):
    """Parameters of the flow `repeat`."""

    run_id: RunId | None = Field(None, description="MLflow run to repeat; empty: the newest finished training")


class PromoteRun(Run):
    """Parameters of the flow `promote`."""

    first = MODEL_NAME | {"min_test_accuracy": ("promote", "min_test_accuracy")}

    run_ids: list[RunId] = Field(
        default_factory=list,
        max_length=10_000,
        description="MLflow runs to choose from; empty: the newest finished run and all on the same cache",
    )
    storage: StorageConfig = StorageConfig()
    promote: PromoteConfig = PromoteConfig()


class PredictRun(SparkRun):
    """Parameters of the flow `predict-batch`."""

    first = TABLES | MODEL_NAME | {name: ("predict", name) for name in ("alias", "table", "predictions")}

    promote: PromoteConfig = Field(
        PromoteConfig(), description="Names the registered model; empty: the one that is trained from the table"
    )
    predict: PredictConfig = PredictConfig()


class MaintainRun(SparkRun):
    """Parameters of the flow `maintain`."""

    first = TABLES | {name: ("maintain", name) for name in ("vacuum_hours", "file_megabytes")}

    maintain: MaintainConfig = MaintainConfig()


class PipelineConfig(SparkRun):
    """Parameters of the whole DAG."""

    first = SOURCE | NETWORK | IMAGE_SIZE | DEVICE_AND_EPOCHS | MODEL_NAME | TABLES
    required = A_FOLDER
    rules = (
        *NETWORK_RULES,
        always({"properties": {"predict": {"properties": {"alias": {"const": "champion"}}}}}),
    )

    etl: EtlConfig = EtlConfig()
    cache: CacheConfig = CacheConfig()
    train: TrainConfig = TrainConfig()
    distributed: DistributedConfig = DistributedConfig()
    promote: PromoteConfig = PromoteConfig()
    predict: PredictConfig = PredictConfig()

    @model_validator(mode="after")
    def _predict_with_what_was_promoted(self) -> Self:
        if self.predict.alias != "champion":
            raise ValueError(
                f"predict.alias is '{self.predict.alias}', but the DAG predicts with the champion it promotes: "
                "leave it out, or run the flow predict-batch alone"
            )
        return self
