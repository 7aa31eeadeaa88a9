"""What a table remembers of how it was made, so that a run with other settings is refused and not mixed in."""

from collections.abc import Mapping
from pathlib import Path

from pyspark.sql.types import StructType

from tasks.config.etl import BUILTIN_DIGITS, EtlConfig
from tasks.errors import WrongInput

PREFIX = "lakevision."

SOURCE_PROPERTY = f"{PREFIX}source"
"""Table property with the folder or URL that the images come from, or the name of the built-in digits."""

ORIGIN = ("source", "labels.by", "labels.pattern", "labels.file")
"""Settings whose change replaces the contents of the tables, where `replace_source` allows it."""


OTHER_TABLES = "other tables (storage.tables), or another home (storage.home or LAKEVISION_HOME)"
"""What an error advises first: the tables that are there stay, with their models and predictions."""


def continued(etl: EtlConfig, found: Mapping[str, str]) -> EtlConfig:
    """Return the settings with which a table goes on: a table that was split by content remains so.

    `stratified` is the default of new tables, so no run is refused for it.

    Args:
        etl: The settings of the run.
        found: The table's properties.
    """
    if etl.split_by == "stratified" and found.get(f"{PREFIX}split_by") == "content":
        return etl.model_copy(update={"split_by": "content"})
    return etl


def source_property(location: Path | str, digits: Path, found: Mapping[str, str]) -> str:
    """Return what a table remembers of its source: the built-in digits are the same wherever the home lies.

    Args:
        location: The source.
        digits: Folder of the built-in digits.
        found: The properties of the table that is there; an older one of the digits has their folder, and keeps it.
    """
    if str(location) != str(digits) or found.get(SOURCE_PROPERTY) == str(digits):
        return str(location)
    return BUILTIN_DIGITS


def table_source(found: Mapping[str, str]) -> str:
    """Return the source that a table's properties name; empty for a table that the flow etl did not make.

    Digits with other splits or labels than the default are another source: their test images are others.
    """
    source = found.get(SOURCE_PROPERTY, "")
    if source != BUILTIN_DIGITS:
        return source
    default = table_properties(EtlConfig(), source)
    others = [
        f"{name.removeprefix(PREFIX)} {found[name] or 'none'}"
        for name in default
        if name != f"{PREFIX}stored_side" and found.get(name, default[name]) != default[name]
    ]
    return f"{source} ({', '.join(others)})" if others else source


def table_properties(etl: EtlConfig, source: Path | str) -> dict[str, str]:
    """Return the properties of tables made with these settings; a setting that is not set is an empty text."""
    settings = {
        "source": str(source),
        "labels.by": etl.labels.by,
        "labels.pattern": etl.labels.pattern or "",
        "labels.file": etl.labels.file or "",
        "stored_side": str(etl.stored_side),
        "split_by": etl.split_by,
        "split_seed": str(etl.split_seed),
        "val_fraction": str(etl.val_fraction),
        "test_fraction": str(etl.test_fraction),
    }
    return {f"{PREFIX}{name}": value for name, value in settings.items()}


def check_properties(found: Mapping[str, str], wanted: Mapping[str, str], path: str, replace_source: bool) -> bool:
    """Refuse settings other than those the table was made with; say whether its contents are to be replaced.

    Raises:
        WrongInput: Names the setting, its value here and in the table.
    """
    replaced = False
    for name, value in wanted.items():
        if found.get(name) == value:
            continue
        setting, made_with = name.removeprefix(PREFIX), found.get(name) or "nothing"
        if setting in ORIGIN and replace_source:
            replaced = True
        elif setting in ORIGIN:
            raise WrongInput(
                f"etl.{setting} is '{value}', but the table '{path}' was made with '{made_with}': give "
                f"{OTHER_TABLES}, or set etl.replace_source to true to replace the table's contents"
            )
        else:
            raise WrongInput(
                f"etl.{setting} is {value}, but the table '{path}' was made with {made_with}: "
                f"use that value, or give {OTHER_TABLES}"
            )
    return replaced


def check_columns(found: StructType, wanted: StructType, path: str) -> None:
    """Refuse a table with other columns than this version of the code writes; it is never changed silently.

    Raises:
        WrongInput: Names the columns that are missing, unknown or of another type.
    """
    has = {field.name: field.dataType.simpleString() for field in found}
    needs = {field.name: field.dataType.simpleString() for field in wanted}
    differences = [
        *(f"lacks {name}" for name in needs if name not in has),
        *(f"has {name}, which is unknown" for name in has if name not in needs),
        *(f"has {name} as {has[name]} and not {kind}" for name, kind in needs.items() if has.get(name, kind) != kind),
    ]
    if differences:
        raise WrongInput(
            f"the table '{path}' {', '.join(differences)}: it was made or changed by other code; "
            f"ingest again into {OTHER_TABLES}"
        )
