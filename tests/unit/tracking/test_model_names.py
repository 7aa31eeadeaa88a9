"""Tests of the default names of registered models."""

import re

import pytest

from tasks.refs import TableRef
from tasks.storage import Storage
from tasks.tracking.models import model_names, source_name

STORAGE = Storage(home="/home", tables="/home/tables", cache="", artifacts="", tracking="")


def names_of(source: str, table_id: str = "one") -> list[str]:
    """Return the model names of a table: the name, and that of earlier releases."""
    return model_names(TableRef(path="/tables/images", version=3, table_id=table_id, source=source), STORAGE)


def named(source: str, table_id: str = "one") -> str:
    """Return the model name of a table."""
    return names_of(source, table_id)[0]


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("/data/photos", "lakevision-photos"),
        ("/data/My Photos=50%/", "lakevision-my-photos-50"),
        ("s3a://bucket/holiday", "lakevision-holiday"),
        ("s3a://bucket", "lakevision-bucket"),
        ("/data/images", "lakevision-images"),
        ("/data/фото", "lakevision-images-5cea44"),
        ("/data/" + "a" * 300, "lakevision-" + "a" * 40),
    ],
)
def test_name_has_the_folder_and_only_characters_that_mlflow_accepts(source: str, name: str) -> None:
    """The name has only letters, digits and hyphens, whatever the folder's name."""
    assert named(source) == name


def test_name_follows_from_the_folder_alone_and_is_the_same_in_every_home() -> None:
    """The place of the folder and the table of its images do not matter; names in other scripts are distinct."""
    assert {named("/data/photos"), named("/mnt/photos/"), named("/data/photos", "two")} == {"lakevision-photos"}
    assert named("/data/фото") != named("/data/写真")


def test_name_of_earlier_releases_differs_by_table_and_source() -> None:
    """It has a suffix for folders of the same name, a recreated table and a replaced source."""
    names = [names_of(*table)[1] for table in (("/data/photos",), ("/mnt/photos",), ("/data/photos", "two"))]
    assert len(set(names)) == 3
    assert all(re.fullmatch("lakevision-photos-[0-9a-f]{6}", name) for name in names)


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
    assert names_of("") == []
