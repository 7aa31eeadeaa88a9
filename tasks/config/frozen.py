"""The base model of all settings: frozen, validated, and described for Prefect's form."""

import importlib
import pkgutil
import sys
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, field_validator
from pydantic_core import CoreSchema

from tasks.config.form import Schema, describe
from tasks.config.values import check_no_control, check_text


class FrozenConfig(BaseModel):
    """A frozen group of settings that refuses unknown names."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        hide_input_in_errors=True,  # it may be a credential
        allow_inf_nan=False,
    )

    @field_validator("*", mode="after")
    @classmethod
    def _check_texts(cls, value: Any) -> Any:
        """Check every string of a setting, including those in lists and the names and values of dicts."""
        if isinstance(value, dict):
            for name, text in value.items():
                check_text(name)
                if isinstance(text, str):
                    check_no_control(text)  # SparkSettings checks these for credentials
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str):
                check_text(text)
        return value

    rules: ClassVar[tuple[Schema, ...]] = ()
    """Rules across fields as JSON schema, so that the form refuses what the validators would."""

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Return the schema that Prefect's form shows and its server validates with; descriptions include bounds."""
        reference = handler(core_schema)
        schema = handler.resolve_ref_schema(reference)
        schema["properties"] = describe(schema.get("properties", {}))
        if cls.rules:
            schema["allOf"] = [*cls.rules]
        return reference


def all_models() -> list[type[FrozenConfig]]:
    """Return the models of all settings and flow parameters; imports every module of this package."""
    package = __name__.rpartition(".")[0]
    for module in pkgutil.iter_modules(sys.modules[package].__path__, f"{package}."):
        importlib.import_module(module.name)
    found = [FrozenConfig]
    for model in found:
        # Other packages derive models, too, such as the command line's parser.
        found += [one for one in model.__subclasses__() if one.__module__.startswith(f"{package}.")]
    return list(dict.fromkeys(found[1:]))
