"""What a table remembers, and what is refused because of it."""

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.types import LongType, StructField, StructType

from tasks.config.etl import EtlConfig
from tasks.errors import WrongInput
from tasks.schema import FILES, IMAGES
from tasks.tables.properties import (
    check_columns,
    check_properties,
    continued,
    source_property,
    table_properties,
    table_source,
)

SOURCE = Path("/photos")
MADE_WITH = table_properties(EtlConfig(), SOURCE)


def check(replace_source: bool = False, source: Path = SOURCE, **settings: Any) -> bool:
    """Check a run with these settings against a table that was made with the defaults."""
    return check_properties(
        MADE_WITH, table_properties(EtlConfig.model_validate(settings), source), "/tables/images", replace_source
    )


def test_same_settings_pass() -> None:
    """And replace nothing; gates and bounds may differ, since no row depends on who closed them."""
    assert check() is False
    assert check(max_bad_fraction=0.5, min_images_per_class=3, deleted="keep", replace_source=True) is False


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"stored_side": 64}, "etl.stored_side is 64, but the table '/tables/images' was made with 512: use that"),
        ({"split_seed": 2}, "etl.split_seed is 2"),
        ({"val_fraction": 0.3}, "etl.val_fraction is 0.3"),
        ({"test_fraction": 0.3}, "etl.test_fraction is 0.3"),
        ({"split_by": "folder"}, "etl.split_by is folder, but the table '/tables/images' was made with stratified"),
        (
            {"split_by": "content"},
            "etl.split_by is content, but .* was made with stratified: use that value, or give other",
        ),
    ],
)
def test_settings_that_would_mix_two_tables_are_refused(settings: dict[str, Any], sentence: str) -> None:
    """Also where the source may be replaced: old rows would stay."""
    for replace_source in (False, True):
        with pytest.raises(WrongInput, match=sentence):
            check(replace_source=replace_source, **settings)


@pytest.mark.parametrize(
    ("asked", "made_with", "used"),
    [
        ("stratified", "content", "content"),
        ("stratified", "stratified", "stratified"),
        ("stratified", "folder", "stratified"),
        ("content", "content", "content"),
        ("content", "stratified", "content"),
    ],
)
def test_a_table_that_was_split_by_content_goes_on_so(asked: str, made_with: str, used: str) -> None:
    """The default of new tables refuses no run; what is no default is asked for, and refused where it differs."""
    etl = EtlConfig.model_validate({"split_by": asked})
    assert continued(etl, {"lakevision.split_by": made_with}).split_by == used
    assert continued(etl, {}) is etl


def test_what_leaves_the_tables_as_they_are_is_advised_first() -> None:
    """A user who has digits in the home needs neither another home nor to lose them."""
    elsewhere = r"other tables \(storage.tables\), or another home \(storage.home or LAKEVISION_HOME\)"
    with pytest.raises(WrongInput, match=f"give {elsewhere}, or set etl.replace_source to true"):
        check(source=Path("/other"))
    with pytest.raises(WrongInput, match=f"use that value, or give {elsewhere}"):
        check(stored_side=64)
    with pytest.raises(WrongInput, match=f"ingest again into {elsewhere}"):
        check_columns(StructType([]), FILES, "/t")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"source": Path("/other")}, "etl.source is '/other', but .* was made with '/photos': .* etl.replace_source"),
        ({"labels": {"by": "pattern", "pattern": "(a)"}}, "etl.labels.by is 'pattern', but .* made with 'folder'"),
        ({"labels": {"by": "file", "file": "l.csv"}}, "etl.labels.by is 'file'"),
    ],
)
def test_another_source_and_other_labels_replace_where_it_is_allowed(settings: dict[str, Any], sentence: str) -> None:
    """And are refused where it is not, with the setting that allows it."""
    with pytest.raises(WrongInput, match=sentence):
        check(**settings)
    assert check(replace_source=True, **settings) is True


def test_digits_are_the_same_source_wherever_the_home_lies() -> None:
    """An older table of them names their folder, and goes on with it."""
    digits = Path("/home/digits")
    assert source_property(digits, digits, {}) == "builtin:digits"
    assert source_property(digits, digits, {"lakevision.source": "builtin:digits"}) == "builtin:digits"
    assert source_property(digits, digits, {"lakevision.source": "/home/digits"}) == "/home/digits"
    assert source_property(Path("/photos"), digits, {}) == "/photos"
    moved = table_properties(EtlConfig(), source_property(Path("/moved/digits"), Path("/moved/digits"), {}))
    assert check_properties(table_properties(EtlConfig(), "builtin:digits"), moved, "/t", False) is False


@pytest.mark.parametrize(
    ("settings", "source"),
    [
        ({}, "builtin:digits"),
        ({"stored_side": 64}, "builtin:digits"),
        ({"split_by": "content", "split_seed": 7}, "builtin:digits (split_by content, split_seed 7)"),
        ({"val_fraction": 0.2}, "builtin:digits (val_fraction 0.2)"),
    ],
)
def test_digits_with_other_splits_are_another_source(settings: dict[str, Any], source: str) -> None:
    """Their champions were tested on other images; a folder's source is the folder."""
    etl = EtlConfig.model_validate(settings)
    assert table_source(table_properties(etl, "builtin:digits")) == source
    assert table_source(table_properties(etl, "/photos")) == "/photos"
    assert table_source({}) == ""


def test_table_that_remembers_nothing_is_refused() -> None:
    """It was made by something else."""
    with pytest.raises(WrongInput, match="etl.source is '/photos', but the table '/t' was made with 'nothing'"):
        check_properties({}, MADE_WITH, "/t", False)


def test_own_columns_pass() -> None:
    """In any order."""
    check_columns(StructType(list(reversed(IMAGES.fields))), IMAGES, "/t")


def test_other_columns_are_named() -> None:
    """Missing, unknown, and of another type."""
    fields = [field for field in FILES if field.name not in {"split", "label"}]
    fields += [StructField("label", LongType()), StructField("note", LongType())]

    with pytest.raises(WrongInput) as refused:
        check_columns(StructType(fields), FILES, "/t")
    assert str(refused.value).startswith(
        "the table '/t' lacks split, has note, which is unknown, has label as bigint and not string: it was made or "
    )
