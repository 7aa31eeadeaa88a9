"""The flow `explain`: heat maps of files, folders and images of the table, and its refusals."""

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pytest
from PIL import Image

from flows.explain import explain
from tasks.errors import WrongInput
from tasks.schema import IMAGES_ARROW
from tasks.storage import Storage
from tests.builders.homes import home_with_tracking
from tests.builders.services import NAME, register

pytestmark = pytest.mark.usefixtures("prefect_harness")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, empty_tracking: Path) -> Storage:
    """Return a home with a champion."""
    folder = tmp_path_factory.mktemp("explain")
    storage = home_with_tracking(folder / "home", empty_tracking)
    register(storage, folder, 1, "champion")
    return storage


@pytest.fixture
def storage(home: Storage, tmp_path: Path) -> Storage:
    """Return the home with tables of the test's own."""
    return home.model_copy(update={"tables": str(tmp_path / "tables")})


@pytest.fixture
def run(storage: Storage) -> Callable[..., Any]:
    """Return a function that explains images by the champion."""

    def run_with(*images: object, **settings: Any) -> Any:
        given = {"images": [str(image) for image in images]} | settings
        return explain({"storage": storage.as_config(), "model_name": NAME, "explain": given})

    return run_with


def test_files_and_folders_have_a_heat_map_each(run: Callable[..., Any], source: Path, storage: Storage) -> None:
    """In the home, in full size; broken files are left out, and hidden ones."""
    (source / "red" / "broken.png").write_bytes(b"broken")
    (source / "red" / ".hidden.png").write_bytes(b"hidden")
    first = source / "blue" / "000.png"
    report = run(first, source / "red", max_images=5)

    assert [Path(one.path).parent.name for one in report.images] == ["blue", *["red"] * 4]
    assert report.folder == f"{storage.home}/explanations"
    for one in report.images:
        with Image.open(one.file) as shown:
            assert (shown.format, shown.size) == ("JPEG", (448, 448))
        assert one.thumbnail.startswith("data:image/jpeg;base64,")
        assert one.label in {"blue", "green", "red"}
    assert len({one.file for one in report.images}) == 5


def test_another_class_and_folder_may_be_named(run: Callable[..., Any], source: Path, tmp_path: Path) -> None:
    """Of each image, whatever is most probable."""
    report = run(source / "red", label="green", folder=str(tmp_path / "maps"), max_images=2)

    assert {one.label for one in report.images} == {"green"}
    assert len(list((tmp_path / "maps").iterdir())) == 2


def test_an_image_of_the_table_is_named_by_its_sha256(run: Callable[..., Any], source: Path, storage: Storage) -> None:
    """Without Spark; another one is refused."""
    row = {"sha256": "a" * 64, "label": "red", "content": (source / "red" / "000.png").read_bytes()}
    row |= {"width": 24, "height": 24, "split": "test", "ingested_at": datetime(2026, 11, 30, tzinfo=UTC)}
    deltalake.write_deltalake(storage.table("images"), pa.Table.from_pylist([row], IMAGES_ARROW))
    (one,) = run("a" * 64).images

    assert one.path == "a" * 64
    with pytest.raises(WrongInput, match="the table '.*' has no image with this sha256"):
        run("b" * 64)


@pytest.mark.parametrize(
    ("images", "settings", "sentence"),
    [
        ((), {}, "explain.images is empty: give files, folders, or the sha256 of images in the table"),
        (("/no/such/file",), {}, "explain.images has '/no/such/file', which is not a file or folder on this machine"),
        (("s3a://bucket/photo.jpg",), {}, "which is not a file or folder on this machine"),
        (("/etc/hostname",), {}, "explain.images has no image that can be decoded"),
        (("/etc/hostname",), {"label": "owl"}, "explain.label is 'owl', which is not one of the 3 classes"),
        (("/etc/hostname",), {"alias": "best"}, "has no version with the alias 'best'"),
    ],
)
def test_what_cannot_be_explained_is_refused(
    run: Callable[..., Any], images: tuple[str, ...], settings: dict[str, Any], sentence: str
) -> None:
    """With its value and the way out."""
    with pytest.raises(WrongInput, match=sentence):
        run(*images, **settings)
