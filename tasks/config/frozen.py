"""The base model of all settings: frozen, validated, and described for Prefect's form."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, ValidationInfo, field_validator, model_validator
from pydantic_core import CoreSchema

from tasks.config.form import describe
from tasks.config.values import check_no_control, check_text
from tasks.errors import WrongInput, similar_names


@dataclass(frozen=True)
class AsBefore:
    """Marker of a setting that was added to its group later, as in `Annotated[int, AsBefore(0)]`.

    Digests of settings leave the setting out where it has this value, so that training runs, caches and searches of
    older releases keep their keys. The default may be another value: it then makes another key.

    Attributes:
        value: The value that has the effect that the group had without the setting.
    """

    value: Any


RECORDED = "recorded"
"""Validation context of settings that a run or cache recorded: those that it lacks have their value of AsBefore."""


def added_settings(model: type[BaseModel]) -> dict[str, AsBefore]:
    """Return the marker of each setting that was added later."""
    return {
        name: marker
        for name, field in model.model_fields.items()
        for marker in field.metadata
        if isinstance(marker, AsBefore)
    }


def hashed_settings(model: BaseModel, names: Collection[str]) -> dict[str, Any]:
    """Return the settings of these names for a digest, without those that have the value of their AsBefore."""
    markers = added_settings(type(model))
    return {
        name: _hashed(getattr(model, name), value)
        for name, value in model.model_dump(include=set(names)).items()
        if name not in markers or markers[name].value != getattr(model, name)
    }


def _hashed(value: Any, dumped: Any) -> Any:
    if isinstance(value, BaseModel):
        return hashed_settings(value, type(value).model_fields)
    if isinstance(value, list):
        return [_hashed(*pair) for pair in zip(value, dumped, strict=True)]
    return dumped


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

    @model_validator(mode="before")
    @classmethod
    def _suggest_names(cls, values: Any) -> Any:
        """Refuse an unknown name that resembles a setting's; any other is refused with the other errors."""
        known = {*cls.model_fields, *getattr(cls, "first_screen", ())}
        for name in (set(map(str, values)) - known) if isinstance(values, Mapping) else ():
            if advice := similar_names(name, known, ""):
                raise WrongInput(f"{name} is not a setting", setting=name, way_out=advice)
        return values

    @model_validator(mode="before")
    @classmethod
    def _complete_recorded(cls, values: Any, info: ValidationInfo) -> Any:
        if info.context != RECORDED or not isinstance(values, Mapping):
            return values
        return {name: marker.value for name, marker in added_settings(cls).items()} | dict(values)

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Return the schema that Prefect's form shows and its server validates with; descriptions include bounds."""
        reference = handler(core_schema)
        schema = handler.resolve_ref_schema(reference)
        schema["properties"] = describe(schema.get("properties", {}))
        return reference


def flat_params(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings as MLflow parameters, with their names joined by dots."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= flat_params(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat
