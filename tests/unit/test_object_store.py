"""Access to folders by fsspec, whatever they are called."""

from pathlib import Path

import pytest

from tasks.errors import WrongInput
from tasks.object_store import file_system, list_names


@pytest.mark.parametrize("name", ["a::b", "a b%20c", "a?b#c", "*"])
def test_a_folder_is_the_one_that_was_named(tmp_path: Path, name: str) -> None:
    """Two colons name a chain of file systems for fsspec, which would take the folder before them."""
    (tmp_path / name).mkdir()
    (tmp_path / name / "inside").touch()
    filesystem, root = file_system(str(tmp_path / name))

    assert root == str(tmp_path / name)
    assert filesystem.exists(f"{root}/inside")
    assert list_names(str(tmp_path / name)) == ["inside"]


def test_two_colons_in_the_url_of_a_store_are_refused() -> None:
    """Before anything is read or written in another folder."""
    with pytest.raises(WrongInput, match="'s3a://lake/a::b' has two colons in a row"):
        file_system("s3a://lake/a::b")
