"""Tests of the default names of registered models."""

import re

import pytest

from tasks.refs import TableRef
from tasks.storage import Storage
from tasks.tracking.models import derived_model_name, source_name

STORAGE = Storage(home="/home", tables="/home/tables", cache="", artifacts="", tracking="")


def named(source: str, table_id: str = "one") -> str | None:
    """Return the derived model name of a table."""
    return derived_model_name(TableRef(path="/tables/images", version=3, table_id=table_id, source=source), STORAGE)


@pytest.mark.parametrize(
    ("source", "begins"),
    [
        ("/data/photos", "lakevision-photos-"),
        ("/data/My Photos=50%/", "lakevision-my-photos-50-"),
        ("s3a://bucket/holiday", "lakevision-holiday-"),
        ("s3a://bucket", "lakevision-bucket-"),
        ("/data/фото", "lakevision-images-"),
        ("/data/" + "a" * 300, "lakevision-" + "a" * 40 + "-"),
    ],
)
def test_name_has_the_folder_and_only_characters_that_mlflow_accepts(source: str, begins: str) -> None:
    """The name has only letters, digits and hyphens, whatever the folder's name."""
    name = named(source)
    assert name is not None
    assert re.fullmatch(f"{begins}[0-9a-f]{{6}}", name)


def test_name_is_deterministic_and_differs_by_table_and_source() -> None:
    """Folders of the same name, a recreated table and a replaced source have different model names."""
    names = [named("/data/photos"), named("/mnt/photos"), named("/data/photos", "two")]
    assert len(set(names)) == 3
    assert named("/data/photos") == names[0]


def test_built_in_digits_have_the_same_name_in_every_table() -> None:
    """The digits are the same images everywhere; another folder with that name is a different source."""
    assert named("/home/digits") == named("/home/digits", "two") == "lakevision-digits"
    assert named("/data/digits") != "lakevision-digits"
    table = TableRef(path="", version=0, source="/home/digits")
    assert source_name(table, STORAGE) == "builtin:digits"


def test_name_of_the_digits_does_not_depend_on_the_home() -> None:
    """A moved home keeps its champion; digits with other splits, thus other test images, have another name."""
    assert named("builtin:digits") == "lakevision-digits"
    other, seed = named("builtin:digits (split_by content)"), named("builtin:digits (split_seed 7)")
    assert len({other, seed, "lakevision-digits"}) == 3
    assert re.fullmatch("lakevision-digits-[0-9a-f]{6}", str(other))
    assert named("builtin:digits (split_by content)", "two") == other


def test_table_without_a_source_has_no_model_name() -> None:
    """No name is derived for a table that other software created."""
    assert named("") is None
