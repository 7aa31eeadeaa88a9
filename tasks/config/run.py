"""Base models of the flows' parameters."""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema

from tasks.config.form import Schema, form_properties, require_setting
from tasks.config.frozen import FrozenConfig
from tasks.config.storage import SparkConfig, StorageConfig
from tasks.errors import WrongInput


class Run(FrozenConfig):
    """Parameters of a flow: groups of settings; those in `first_screen` may also be given without their group."""

    first_screen: ClassVar[Mapping[str, tuple[str, str]]] = {}
    """Frequently changed settings, by their name in the form, with their group and their name in it."""

    required: ClassVar[tuple[str, str] | None] = None
    """The setting in `first_screen` without a useful default, which runs of a deployment must give; its description."""

    @model_validator(mode="before")
    @classmethod
    def _move_into_groups(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        placed = dict(values)
        for name, (group, field) in cls.first_screen.items():
            given, settings = placed.pop(name, None), placed.get(group, {})
            if isinstance(settings, BaseModel):
                settings = settings.model_dump(exclude_unset=True)
            if given is None or not isinstance(settings, Mapping):
                continue
            if settings.get(field, given) != given:
                raise WrongInput(
                    f"{name} and {group}.{field} are the same setting and differ",
                    setting=f"{group}.{field}",
                    way_out="leave one of them out",
                )
            placed[group] = {**settings, field: given}
        return placed

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Return the schema of the flow's form: frequently changed settings first, then the folded groups."""
        reference = super().__get_pydantic_json_schema__(core_schema, handler)
        schema = handler.resolve_ref_schema(reference)
        properties: dict[str, Schema] = schema["properties"]
        groups = {name: handler.resolve_ref_schema(group) for name, group in properties.items() if "$ref" in group}
        schema["properties"] = form_properties(properties, groups, cls.first_screen, cls.required or ())
        if cls.required:
            name, description = cls.required
            schema.update(require_setting(name, description, *cls.first_screen[name]))
        return reference


TABLES = {"tables": ("storage", "tables")}


class SparkRun(Run):
    """Parameters common to all flows that run Spark."""

    storage: StorageConfig = StorageConfig()
    spark: SparkConfig = SparkConfig()
