"""Table properties with the settings of the ETL, and checks against them."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from pyspark.sql.types import LongType, StructField, StructType

from tasks.config.etl import EtlConfig
from tasks.errors import WrongInput
from tasks.schema import ADDED_TO_FILES, FILES, IMAGES
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
    """The same settings replace nothing, and quality gates may differ, since the rows do not depend on them."""
    assert check() is False
    assert check(max_bad_fraction=0.5, min_images_per_class=3, deleted="keep", replace_source=True) is False


def test_pattern_in_another_form_of_unicode_is_the_same() -> None:
    """It finds the same labels; a path in another form is another folder."""
    composed, decomposed = ({"labels": {"by": "pattern", "pattern": f"({text})"}} for text in ("\u00e9", "e\u0301"))
    made_with = table_properties(EtlConfig.model_validate(composed), SOURCE)

    same = table_properties(EtlConfig.model_validate(decomposed), SOURCE)
    assert check_properties(made_with, same, "/tables/images", replace_source=True) is False
    folders = [table_properties(EtlConfig(), Path(f"/{text}")) for text in ("\u00e9", "e\u0301")]
    assert check_properties(*folders, "/tables/images", replace_source=True) is True


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"stored_side": 64}, "is 64, but .* '/tables/images' was made with 512"),
        ({"split_seed": 2}, "etl.split_seed is 2"),
        ({"val_fraction": 0.3}, "etl.val_fraction is 0.3"),
        ({"test_fraction": 0.3}, "etl.test_fraction is 0.3"),
        ({"split_by": "folder"}, "is folder, but .* was made with stratified"),
        ({"split_by": "content"}, "is content, but .* was made with stratified"),
        ({"split_group": {"by": "near_duplicates"}}, "split_group.by is near_duplicates, but .* was made with none"),
        ({"sample_bits": 12}, "etl.sample_bits is 12, but .* was made with nothing"),
        ({"decode_version": 1}, "etl.decode_version is 1, but .* was made with 3"),
    ],
)
def test_settings_that_would_mix_two_tables_are_refused(settings: dict[str, Any], sentence: str) -> None:
    """Settings that existing rows depend on are refused, also with replace_source: old rows would stay."""
    for replace_source in (False, True):
        with pytest.raises(WrongInput, match=sentence) as refused:
            check(replace_source=replace_source, **settings)
        assert [str(refused.value.setting).removesuffix(".by")] == [f"etl.{name}" for name in settings]
        assert refused.value.way_out.startswith("use that value, or give other tables")


@pytest.mark.parametrize(
    ("requested", "made_with", "used"),
    [
        ("stratified", "content", "content"),
        ("stratified", "stratified", "stratified"),
        ("stratified", "folder", "stratified"),
        ("content", "content", "content"),
        ("content", "stratified", "content"),
    ],
)
def test_table_split_by_content_keeps_that_split(requested: str, made_with: str, used: str) -> None:
    """A table split by content is continued with the default settings; other values of split_by are kept."""
    etl = EtlConfig.model_validate({"split_by": requested})
    assert continued(etl, {"lakevision.split_by": made_with}).split_by == used
    assert continued(etl, {}).split_by == requested


def test_table_keeps_its_version_of_decoding() -> None:
    """A table of an earlier release, which records none, continues with version 1 and without bits of samples."""
    earlier = {name: text for name, text in MADE_WITH.items() if not name.endswith(("decode_version", "sample_bits"))}

    def wanted(**settings: object) -> dict[str, str]:
        return table_properties(continued(EtlConfig.model_validate(settings), earlier), SOURCE)

    assert continued(EtlConfig(), earlier).decode_version == 1
    assert continued(EtlConfig(), MADE_WITH).decode_version == 3
    second = MADE_WITH | {"lakevision.decode_version": "2"}
    assert continued(EtlConfig(sample_bits=12), second) == EtlConfig(sample_bits=12, decode_version=2)
    assert continued(EtlConfig(decode_version=2), MADE_WITH).decode_version == 2  # and is refused
    with pytest.raises(WrongInput, match="sample_bits is 12, but the tables are decoded by version 1, .*: leave it"):
        continued(EtlConfig(sample_bits=12), earlier)
    assert check_properties(earlier, wanted(), "/tables/images", replace_source=False) is False
    with pytest.raises(ValidationError, match="sample_bits is 12, but decode_version is 1, which does not use it"):
        EtlConfig(sample_bits=12, decode_version=1)


def test_table_of_an_earlier_release_has_no_groups() -> None:
    """It is continued without, and any groups are refused; near-duplicates of another distance are other groups."""
    earlier = {name: text for name, text in MADE_WITH.items() if "group" not in name and "near" not in name}
    assert len(earlier) == len(MADE_WITH) - 4
    assert check_properties(earlier, MADE_WITH, "/tables/images", replace_source=False) is False
    assert table_source(earlier | {"lakevision.source": "builtin:digits"}) == "builtin:digits"
    assert check(near_duplicate_bits=5) is False  # a bound of a report alone

    def wanted(**settings: object) -> dict[str, str]:
        return table_properties(EtlConfig.model_validate(settings), SOURCE)

    patient = {"by": "pattern", "pattern": "(patient)"}
    with pytest.raises(WrongInput, match="etl.split_group.by is pattern, but .* was made with none"):
        check_properties(earlier, wanted(split_group=patient), "/t", replace_source=True)
    other = wanted(split_group={"by": "pattern", "pattern": "(video)"})
    with pytest.raises(WrongInput, match=r"split_group.pattern is \(video\), but .* was made with \(patient\)"):
        check_properties(wanted(split_group=patient), other, "/t", replace_source=True)
    near = {"split_group": {"by": "near_duplicates"}}
    with pytest.raises(WrongInput, match="etl.near_duplicate_bits is 5, but .* was made with 3"):
        check_properties(wanted(**near), wanted(**near, near_duplicate_bits=5), "/t", replace_source=True)


def test_messages_advise_other_tables_first() -> None:
    """The first advice, other tables or another home, does not change the existing tables."""
    elsewhere = r"other tables \(storage.tables\), or another home \(storage.home or LAKEVISION_HOME\)"
    with pytest.raises(WrongInput, match=f"give {elsewhere}, or set etl.replace_source to true"):
        check(source=Path("/other"))
    with pytest.raises(WrongInput, match=f"use that value, or give {elsewhere}"):
        check(stored_side=64)
    with pytest.raises(WrongInput, match=f"ingest again into {elsewhere}"):
        check_columns(StructType([]), FILES, "/t")


def test_ledger_of_an_earlier_release_is_accepted() -> None:
    """It lacks columns that the next run with changes adds; any other column must be there."""
    old = StructType([column for column in FILES if column.name not in ADDED_TO_FILES])
    assert check_columns(old, FILES, "/t", ADDED_TO_FILES) is None
    with pytest.raises(WrongInput, match="lacks changed_at, lacks inode: it was made"):
        check_columns(old, FILES, "/t")
    with pytest.raises(WrongInput, match="lacks detail: it was made"):
        check_columns(StructType([column for column in old if column.name != "detail"]), FILES, "/t", ADDED_TO_FILES)


@pytest.mark.parametrize(
    ("settings", "setting", "sentence"),
    [
        ({"source": Path("/other")}, "etl.source", "'/other', but .* was made with '/photos'"),
        ({"labels": {"by": "pattern", "pattern": "(a)"}}, "etl.labels.by", "'pattern', but .* made with 'folder'"),
        ({"labels": {"by": "file", "file": "l.csv"}}, "etl.labels.by", "etl.labels.by is 'file'"),
    ],
)
def test_another_source_and_other_labels_need_replace_source(
    settings: dict[str, Any], setting: str, sentence: str
) -> None:
    """Another source or other labels replace the contents with replace_source, and are refused without it."""
    with pytest.raises(WrongInput, match=sentence) as refused:
        check(**settings)
    assert refused.value.setting == setting
    assert "etl.replace_source" in refused.value.way_out
    assert check(replace_source=True, **settings) is True


def test_digits_are_the_same_source_in_every_home(tmp_path: Path) -> None:
    """The property of the built-in digits does not depend on the home; older tables keep the digits' folder."""
    digits = Path("/home/digits")
    assert source_property(digits, digits, {}) == "builtin:digits"
    assert source_property(digits, digits, {"lakevision.source": "builtin:digits"}) == "builtin:digits"
    assert source_property(digits, digits, {"lakevision.source": "/home/digits"}) == "/home/digits"
    assert source_property(Path("/photos"), digits, {}) == "/photos"
    # A moved home keeps the former folder; the digits of another home, or a folder that exists, are another source.
    former = tmp_path / "home" / "digits"
    assert source_property(digits, digits, {"lakevision.source": str(former)}) == str(former)
    assert source_property(digits, digits, {"lakevision.source": "/other/digits"}) == "builtin:digits"
    assert source_property(digits, digits, {"lakevision.source": "s3a://bucket/home/digits"}) == "builtin:digits"
    former.mkdir(parents=True)
    assert source_property(digits, digits, {"lakevision.source": str(former)}) == "builtin:digits"
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
    """Digits with non-default splits are another source, since their test images differ; a folder is its own source."""
    etl = EtlConfig.model_validate(settings)
    assert table_source(table_properties(etl, "builtin:digits")) == source
    assert table_source(table_properties(etl, "/photos")) == "/photos"
    assert table_source({}) == ""


def test_table_without_properties_is_refused() -> None:
    """A table without properties was made by another program."""
    with pytest.raises(WrongInput, match="'/photos', but .* '/t' .* 'nothing'") as refused:
        check_properties({}, MADE_WITH, "/t", False)
    assert refused.value.setting == "etl.source"


def test_expected_columns_pass() -> None:
    """The expected columns are accepted in any order."""
    check_columns(StructType(list(reversed(IMAGES.fields))), IMAGES, "/t")


def test_other_columns_are_named() -> None:
    """The message names columns that are missing, unknown, or of another type."""
    fields = [field for field in FILES if field.name not in {"split", "label"}]
    fields += [StructField("label", LongType()), StructField("note", LongType())]

    with pytest.raises(WrongInput) as refused:
        check_columns(StructType(fields), FILES, "/t")
    assert str(refused.value).startswith(
        "the table '/t' lacks split, has note, which is unknown, has label as bigint and not string: it was made or "
    )
