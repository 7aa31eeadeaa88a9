"""Table properties that record the settings of the ETL, and checks of a run's settings against them."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from pyspark.sql.types import StructType

from tasks.config.etl import BUILTIN_DIGITS, EtlConfig
from tasks.errors import WrongInput
from tasks.text.forms import composed

PREFIX = "lakevision."

SOURCE_PROPERTY = f"{PREFIX}source"
"""Table property with the folder or URL of the images, or the name of the built-in digits."""

STORED_SIDE_PROPERTY = f"{PREFIX}stored_side"
"""Table property with the longest side of an image that is stored unchanged, in pixels."""

DECODE_VERSION_PROPERTY, SAMPLE_BITS_PROPERTY = f"{PREFIX}decode_version", f"{PREFIX}sample_bits"
"""Table properties with the version of decoding, and with the bits of deep samples where a setting says them."""

PATTERN_PROPERTY = f"{PREFIX}labels.pattern"
"""Table property with the pattern of labels, which has one meaning in all forms of Unicode."""

_WITHOUT_EFFECT_ON_DIGITS = frozenset({STORED_SIDE_PROPERTY, DECODE_VERSION_PROPERTY, SAMPLE_BITS_PROPERTY})

ADDED_PROPERTIES = {
    f"{PREFIX}sample_fraction": "1.0",
    f"{PREFIX}split_group.by": "none",
    f"{PREFIX}split_group.pattern": "",
    f"{PREFIX}split_group.column": "",
    f"{PREFIX}near_duplicate_bits": "",
}
"""Table properties of the sample and of the groups that have one split, with their values without these."""

ORIGIN = ("source", "labels.by", "labels.pattern", "labels.file")
"""Settings whose change replaces the contents of the tables, if `replace_source` is true."""


OTHER_TABLES = "other tables (storage.tables), or another home (storage.home or LAKEVISION_HOME)"
"""First advice of error messages: it leaves the existing tables as they are, with their models and predictions."""


def split_properties(values: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """Return Delta's own properties of a new table, and the text with all others for its description.

    delta-rs accepts no others when it creates a table together with its first files.
    """
    own = {name: value for name, value in values.items() if name.startswith("delta.")}
    return own, json.dumps({name: value for name, value in values.items() if name not in own})


def join_properties(configuration: Mapping[str, str], description: str | None) -> dict[str, str]:
    """Return the properties of a table, those in its description included; a property that was set since counts."""
    try:
        described = json.loads(description or "{}")
    except ValueError:
        described = {}  # a text for readers
    found = described.items() if isinstance(described, dict) else ()
    return {name: str(value) for name, value in found if name.startswith(PREFIX)} | dict(configuration)


def with_defaults(found: Mapping[str, str]) -> dict[str, str]:
    """Return a table's properties, with the values of those that tables of earlier releases lack."""
    return {DECODE_VERSION_PROPERTY: "1", SAMPLE_BITS_PROPERTY: "", **ADDED_PROPERTIES, **found}


def continued(etl: EtlConfig, found: Mapping[str, str]) -> EtlConfig:
    """Return the settings that a table is continued with: it keeps a split by content, and its version of decoding.

    Defaults for new tables are not an error for other ones.

    Args:
        etl: The settings of the run.
        found: The table's properties.

    Raises:
        WrongInput: `etl.sample_bits` is set, which the table's version of decoding does not use.
    """
    kept: dict[str, object] = {}
    if etl.split_by == "stratified" and found.get(f"{PREFIX}split_by") == "content":
        kept["split_by"] = "content"
    version = int(with_defaults(found)[DECODE_VERSION_PROPERTY])
    if etl.decode_version > version:
        if etl.sample_bits is not None and version == 1:
            raise WrongInput(
                f"etl.sample_bits is {etl.sample_bits}, but the tables are decoded by version 1, which ignores it",
                setting="etl.sample_bits",
                way_out=f"leave it out, or give {OTHER_TABLES}",
            )
        kept["decode_version"] = version
    return etl.model_copy(update=kept)


def source_property(location: Path | str, digits: Path, found: Mapping[str, str]) -> str:
    """Return the property of a table's source; the built-in digits have the same one in every home.

    Args:
        location: The source.
        digits: Folder of the built-in digits.
        found: Properties of the existing table; older tables of the digits have their folder, and keep it, also in a
            home that was moved to another parent folder.
    """
    if str(location) != str(digits):
        return str(location)
    recorded = Path(found.get(SOURCE_PROPERTY, ""))
    # A folder that exists may be a source of its own, or that of a copied home's original.
    is_former = recorded.is_absolute() and recorded.parts[-2:] == digits.parts[-2:] and not os.path.exists(recorded)
    return str(recorded) if recorded == digits or is_former else BUILTIN_DIGITS


def table_source(found: Mapping[str, str]) -> str:
    """Return the source in a table's properties; empty for a table that the flow etl did not make.

    Digits with non-default splits or labels count as another source, since their test images differ.
    """
    source = found.get(SOURCE_PROPERTY, "")
    if source != BUILTIN_DIGITS:
        return source
    default = table_properties(EtlConfig(), source)
    others = [
        f"{name.removeprefix(PREFIX)} {found[name] or 'none'}"
        for name in default
        if name not in _WITHOUT_EFFECT_ON_DIGITS and found.get(name, default[name]) != default[name]
    ]
    return f"{source} ({', '.join(others)})" if others else source


def table_properties(etl: EtlConfig, source: Path | str) -> dict[str, str]:
    """Return the properties of tables made with these settings; an unset setting is an empty string."""
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
        "decode_version": str(etl.decode_version),
        "sample_bits": str(etl.sample_bits or ""),
        "sample_fraction": str(etl.sample_fraction),
        "split_group.by": etl.split_group.by,
        "split_group.pattern": etl.split_group.pattern or "",
        "split_group.column": etl.split_group.column or "",
        "near_duplicate_bits": str(etl.near_duplicate_bits) if etl.split_group.by == "near_duplicates" else "",
    }
    return {f"{PREFIX}{name}": value for name, value in settings.items()}


def check_properties(found: Mapping[str, str], wanted: Mapping[str, str], path: str, replace_source: bool) -> bool:
    """Check the settings against those that the table was made with; return whether its contents are replaced.

    Raises:
        WrongInput: A setting differs; the message names it, its value, and the table's value.
    """
    replaced, found = False, with_defaults(found)
    for name, value in wanted.items():
        if found.get(name) == value or (
            name == PATTERN_PROPERTY and composed(found.get(name) or "") == composed(value)
        ):
            continue
        setting, made_with = name.removeprefix(PREFIX), found.get(name) or "nothing"
        if setting in ORIGIN and replace_source:
            replaced = True
        elif setting in ORIGIN:
            raise WrongInput(
                f"etl.{setting} is '{value}', but the table '{path}' was made with '{made_with}'",
                setting=f"etl.{setting}",
                way_out=f"give {OTHER_TABLES}, or set etl.replace_source to true to replace the table's contents",
            )
        else:
            raise WrongInput(
                f"etl.{setting} is {value}, but the table '{path}' was made with {made_with}",
                setting=f"etl.{setting}",
                way_out=f"use that value, or give {OTHER_TABLES}",
            )
    return replaced


def check_columns(found: StructType, wanted: StructType, path: str, added: Sequence[str] = ()) -> None:
    """Check that a table has the columns that this version of the code writes; no table is altered silently.

    Args:
        found: Columns of the table.
        wanted: Columns that the code writes.
        path: Path or URL of the table.
        added: Columns that tables of earlier releases lack, which a run adds.

    Raises:
        WrongInput: Columns are missing, unknown or of another type; the message names them.
    """
    has = {field.name: field.dataType.simpleString() for field in found}
    needs = {field.name: field.dataType.simpleString() for field in wanted}
    differences = [
        *(f"lacks {name}" for name in needs if name not in has and name not in added),
        *(f"has {name}, which is unknown" for name in has if name not in needs),
        *(f"has {name} as {has[name]} and not {kind}" for name, kind in needs.items() if has.get(name, kind) != kind),
    ]
    if differences:
        raise WrongInput(
            f"the table '{path}' {', '.join(differences)}",
            setting="storage.tables",
            way_out=f"it was made or changed by other code; ingest again into {OTHER_TABLES}",
        )
