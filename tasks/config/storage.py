"""Where things lie, on what Spark they run, and what all settings share."""

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler, field_validator
from pydantic_core import CoreSchema

from tasks.config.form import Schema, describe
from tasks.config.values import Memory, SparkMaster, check_no_control, check_text
from tasks.credentials import SparkSettings, Url


class Settings(BaseModel):
    """A frozen group of settings that refuses names it does not know."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        hide_input_in_errors=True,  # it may be a credential
        allow_inf_nan=False,
    )

    @field_validator("*", mode="after")
    @classmethod
    def _have_nothing_hidden(cls, value: Any) -> Any:
        """Check every text of a setting, in lists and as names and values of settings, too."""
        if isinstance(value, dict):
            for name, text in value.items():
                check_text(name)
                if isinstance(text, str):
                    check_no_control(text)  # SparkSettings looks for credentials there
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str):
                check_text(text)
        return value

    rules: ClassVar[tuple[Schema, ...]] = ()
    """Rules across fields that JSON schema can say, so that a form refuses what the validators would."""

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Return what Prefect's form shows and its server validates with: bounds are in the descriptions."""
        reference = handler(core_schema)
        schema = handler.resolve_ref_schema(reference)
        schema["properties"] = describe(schema.get("properties", {}))
        if cls.rules:
            schema["allOf"] = [*cls.rules]
        return reference


class StorageConfig(Settings):
    """Where a run writes. Every place may be a folder or a URL; what is empty lies under `home`."""

    home: Url | None = Field(
        None, description="Folder for everything a run writes; empty: $LAKEVISION_HOME, else ./.lakevision"
    )
    tables: Url | None = Field(
        None,
        description="Folder or URL of the Delta tables; a name without a slash is a folder under home (./name one in "
        "the current folder); empty: `tables` under home",
    )
    cache: Url | None = Field(None, description="Folder or URL of the training caches; empty: `cache` under home")
    artifacts: Url | None = Field(
        None, description="Folder or URL of MLflow's artifacts; empty: `artifacts` under home"
    )
    tracking: Url | None = Field(
        None,
        description="MLflow tracking URI, without a password; empty: $LAKEVISION_TRACKING_URI, else `mlflow.db` under "
        "home",
    )


class SparkConfig(Settings):
    """The Spark session of ETL, cache and inference."""

    master: SparkMaster = Field("local[*]", description="Spark master URL")
    driver_memory: Memory = Field("3g", description="Java heap of the driver: 512m to 16t, e.g. 3g")
    conf: SparkSettings = Field(default_factory=dict, description="More Spark settings, no secrets; they win over ours")
