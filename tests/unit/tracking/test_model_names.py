"""Names of registered models."""

import re

import pytest

from tasks.refs import TableRef
from tasks.storage import Storage
from tasks.tracking.model_names import derived_model_name, source_name

STORAGE = Storage(home="/home", tables="/home/tables", cache="", artifacts="", tracking="")


def named(source: str, table_id: str = "one") -> str | None:
    """Return the name of the models of a table."""
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
def test_a_name_says_the_folder_and_is_one_that_mlflow_takes(source: str, begins: str) -> None:
    """Whatever the folder is called, the name has letters, digits and hyphens alone."""
    name = named(source)
    assert name is not None
    assert re.fullmatch(f"{begins}[0-9a-f]{{6}}", name)


def test_a_name_is_the_same_in_every_run_and_another_for_another_table_or_source() -> None:
    """Folders of one name, a table that was made anew, and a source that replaced another."""
    names = [named("/data/photos"), named("/mnt/photos"), named("/data/photos", "two")]
    assert len(set(names)) == 3
    assert named("/data/photos") == names[0]


def test_the_built_in_digits_have_one_name_in_every_table() -> None:
    """They are the same images everywhere; a folder of that name elsewhere is another."""
    assert named("/home/digits") == named("/home/digits", "two") == "lakevision-digits"
    assert named("/data/digits") != "lakevision-digits"
    table = TableRef(path="", version=0, source="/home/digits")
    assert source_name(table, STORAGE) == "builtin:digits"


def test_digits_are_known_by_the_table_and_not_by_the_home() -> None:
    """A moved home keeps its champion; digits with other splits, whose test images are others, have another name."""
    assert named("builtin:digits") == "lakevision-digits"
    other, seed = named("builtin:digits (split_by content)"), named("builtin:digits (split_seed 7)")
    assert len({other, seed, "lakevision-digits"}) == 3
    assert re.fullmatch("lakevision-digits-[0-9a-f]{6}", str(other))
    assert named("builtin:digits (split_by content)", "two") == other


def test_a_table_without_a_source_has_no_name() -> None:
    """Somebody else made it."""
    assert named("") is None
