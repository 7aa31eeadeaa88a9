"""The parameters that all flows have in common."""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema

from tasks.config.form import Schema, first_screen, must_be_said
from tasks.config.frozen import FrozenConfig
from tasks.config.storage import SparkConfig, StorageConfig


class Run(FrozenConfig):
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


TABLES = {"tables": ("storage", "tables")}


class SparkRun(Run):
    """What every flow that runs Spark takes."""

    storage: StorageConfig = StorageConfig()
    spark: SparkConfig = SparkConfig()
