"""A live test on tables of requests: what it asks for, when it decides, and the promotion that follows."""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import deltalake
import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from flows.compare_live import compare_live as compare_flow
from tasks.config.promotion import PromoteConfig, RollbackConfig
from tasks.config.serving import LiveTestConfig
from tasks.errors import WrongInput
from tasks.refs import LiveReport, ModelRef, RunRef
from tasks.registry.rollback import roll_back
from tasks.schema import FEEDBACK_ARROW, REQUEST_IMAGES_ARROW, REQUESTS_ARROW
from tasks.serve.live_test import compare_live
from tasks.serve.task import live_markdown
from tasks.storage import Storage
from tasks.tables.direct_commits import append_rows
from tasks.tracking import models
from tasks.tracking.evaluated import evaluated_version
from tasks.tracking.server import client_of
from tests.builders.homes import home_with_tracking
from tests.builders.image_bytes import encoded
from tests.builders.services import NAME, register_again
from tests.builders.untrained_model import PHOTOS, log_run

BEGAN = datetime(2026, 11, 30, 12, tzinfo=UTC)


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory, empty_tracking: Path) -> tuple[Storage, RunRef, RunRef]:
    """Return a home, and two runs with models, each of a table of its own."""
    folder = tmp_path_factory.mktemp("live")
    storage = home_with_tracking(folder / "home", empty_tracking)
    other = PHOTOS.model_copy(update={"table_id": "others"})
    return storage, log_run(storage, folder, 1, 0.9), log_run(storage, folder, 2, 0.9, table=other)


@pytest.fixture
def storage(logged: tuple[Storage, RunRef, RunRef], tmp_path: Path) -> Iterator[Storage]:
    """Return the home with tables of the test's own; what the test registers is deleted."""
    yield logged[0].model_copy(update={"tables": str(tmp_path / "tables")})
    client_of(logged[0]).delete_registered_model(NAME)


@pytest.fixture
def versions(storage: Storage, logged: tuple[Storage, RunRef, RunRef]) -> tuple[ModelRef, ModelRef]:
    """Register champion and challenger."""
    _home, first, second = logged
    return register_again(storage, first, "champion"), register_again(storage, second, "challenger")


def answer(number: int, champion: str, challenger: str | None, **other: Any) -> dict[str, Any]:
    """Return a row of `requests`, which the champion has answered."""
    at = BEGAN + timedelta(seconds=number)
    row = {"day": "2026-11-30", "request_id": f"2026-11-30-{number:04x}", "image": 0, "answered_at": at}
    row |= {"model_name": NAME, "model_version": 1, "answered_by": "champion", "label": champion}
    row |= {"other_version": None if challenger is None else 2, "other_label": challenger}
    return row | {"sha256": f"{number:064x}"} | other


def log(storage: Storage, rows: list[dict[str, Any]]) -> None:
    """Append rows to `requests`, the newest first."""
    table = pa.Table.from_pylist(rows[::-1], REQUESTS_ARROW)
    append_rows(storage.table("requests"), table, None, ("day",))


def label(storage: Storage, labels: dict[int, str]) -> None:
    """Append rows to `feedback`."""
    rows = [
        {"day": "2026-11-30", "request_id": f"2026-11-30-{number:04x}", "image": 0, "label": name, "given_at": BEGAN}
        for number, name in labels.items()
    ]
    append_rows(storage.table("feedback"), pa.Table.from_pylist(rows, FEEDBACK_ARROW), None, ("day",))


def compare(storage: Storage, **settings: Any) -> LiveReport:
    """Run the live test of the model."""
    return compare_live(LiveTestConfig.model_validate(settings), PromoteConfig(model_name=NAME), storage)


def test_a_better_challenger_becomes_the_champion_and_can_be_rolled_back(
    storage: Storage, versions: tuple[ModelRef, ModelRef]
) -> None:
    """With the reason in the registry and in the table `promotions`."""
    first, second = versions
    log(storage, [answer(number, "ant", "bee") for number in range(12)] + [answer(99, "ant", "ant")])
    label(storage, dict.fromkeys(range(12), "bee"))
    report = compare(storage)

    assert (report.outcome, report.champion, report.challenger) == ("promoted", second, 2)
    assert (report.num_compared, report.num_differing) == (13, 12)
    assert report.num_better == report.num_labels < 12
    assert report.p_value <= 0.05
    assert report.asked == ()
    assert models.model_with_alias(storage, NAME, "champion") == second
    assert models.model_with_alias(storage, NAME, "previous") == first
    assert models.model_with_alias(storage, NAME, "challenger") is None
    assert "it alone is right on" in models.version_tags(storage, second)[models.PROMOTION_TAG]
    # The tables that the champion was for, also without a tag of a promotion, have a champion still.
    assert {table.table_id for table in evaluated_version(storage, second).serves} == {"photos", "others"}
    (row,) = deltalake.DeltaTable(storage.table("promotions")).to_pyarrow_table().to_pylist()
    assert (row["decision"], row["from_version"], row["to_version"]) == ("promoted", 1, 2)
    assert "always-valid p-value" in row["reason"]
    done = roll_back(RollbackConfig(model_name=NAME, reason="complaints"), storage)
    assert (done.champion, done.rolled_back) == (first, second)


def test_labels_are_asked_for_in_order_where_the_two_differ(
    storage: Storage, versions: tuple[ModelRef, ModelRef]
) -> None:
    """An image that came twice once, and those of other versions, of errors and without a challenger not at all."""
    rows = [
        answer(1, "ant", "bee"),
        answer(2, "ant", "ant"),
        answer(3, "ant", "bee", sha256=f"{1:064x}"),
        answer(4, "ant", None),
        answer(5, "cat", "bee", model_version=3),
        answer(6, "cat", "bee", model_name="other"),
        answer(7, "cat", "unsure", model_version=2, other_version=1, answered_by="challenger"),
        answer(8, None, None, other_version=2, error="damaged: cut"),
    ]  # fmt: skip
    log(storage, rows)
    content = encoded(Image.fromarray(np.full((30, 20, 3), 90, dtype=np.uint8)), "PNG")
    kept = [{"day": "2026-11-30", "sha256": f"{1:064x}", "content": content}]
    append_rows(storage.table("request_images"), pa.Table.from_pylist(kept, REQUEST_IMAGES_ARROW), None, ("day",))
    report = compare(storage)

    assert report.outcome == "undecided"
    assert (report.num_compared, report.num_differing, report.num_labels) == (4, 2, 0)
    assert [(one.champion_label, one.challenger_label) for one in report.asked] == [("ant", "bee"), ("unsure", "cat")]
    assert [bool(one.thumbnail) for one in report.asked] == [True, False]
    assert report.asked[0].request_id == "2026-11-30-0001"
    assert len(compare(storage, num_asked=1).asked) == 1
    shown = live_markdown(report)
    assert "data:image/jpeg" in shown
    assert shown.index("`2026-11-30-0001`") < shown.index("`2026-11-30-0007`")


def test_labels_after_a_gap_do_not_count_yet(storage: Storage, versions: tuple[ModelRef, ModelRef]) -> None:
    """A user who reports mistakes of the champion alone does not make another one."""
    log(storage, [answer(number, "ant", "bee") for number in range(40)])
    label(storage, dict.fromkeys(range(0, 40, 2), "bee"))
    before = compare(storage)
    label(storage, dict.fromkeys(range(1, 40, 2), "ant"))
    after = compare(storage)

    assert (before.outcome, before.num_labels, before.num_better) == ("undecided", 1, 1)
    assert before.asked[0].request_id == "2026-11-30-0001"
    assert (after.outcome, after.num_labels, after.num_better, after.num_worse) == ("undecided", 40, 20, 20)
    (champion, challenger) = before.accuracies
    assert (champion.accuracy, challenger.accuracy, champion.images) == (0.0, 1.0, 20)
    assert challenger.interval[0] > 0.8


def test_a_worse_challenger_is_found_and_nothing_changes(storage: Storage, versions: tuple[ModelRef, ModelRef]) -> None:
    """Nor does a test without a decision, which ends."""
    log(storage, [answer(number, "ant", "bee") for number in range(30)])
    label(storage, {number: "none" if number < 3 else "ant" for number in range(30)})
    worse, ended = compare(storage), compare(storage, max_labels=3)

    assert (worse.outcome, worse.num_better) == ("worse", 0)
    assert ended.num_labels == 3
    assert "version 2 of 'photos' is worse than version 1" in worse.line
    assert ended.outcome == "ended"
    assert "is not shown to be better after live.max_labels 3" in ended.line
    assert models.model_with_alias(storage, NAME, "champion") == versions[0]
    assert not Path(storage.table("promotions")).exists()


def test_a_user_decides_where_the_settings_say_so(storage: Storage, versions: tuple[ModelRef, ModelRef]) -> None:
    """The report says that it is better, and the alias stays."""
    log(storage, [answer(number, "ant", "bee") for number in range(12)])
    label(storage, dict.fromkeys(range(12), "bee"))
    human = compare_live(LiveTestConfig(), PromoteConfig(model_name=NAME, approval="human"), storage)

    assert (human.outcome, compare(storage, decide=False).outcome) == ("better", "better")
    assert models.model_with_alias(storage, NAME, "champion") == versions[0]


def test_a_test_that_has_ended_promotes_nothing(storage: Storage, versions: tuple[ModelRef, ModelRef]) -> None:
    """Later labels do not count, however many there are at once."""
    log(storage, [answer(number, "ant", "bee") for number in range(12)])
    label(storage, dict.fromkeys(range(12), "bee"))

    assert compare(storage, max_labels=3).outcome == "ended"
    assert models.model_with_alias(storage, NAME, "champion") == versions[0]


def test_late_labels_are_texts_and_count_more_than_feedback(
    storage: Storage, versions: tuple[ModelRef, ModelRef], tmp_path: Path
) -> None:
    """A class 007 stays a text, and an expert corrects a user."""
    log(storage, [answer(number, "007", "008") for number in range(12)])
    label(storage, dict.fromkeys(range(12), "008"))
    file = tmp_path / "labels.csv"
    file.write_text("sha256,label\n" + "".join(f"{number:064x},007\n" for number in range(12)))
    report = compare(storage, labels=str(file))

    assert (report.outcome, report.num_better) == ("worse", 0)


@pytest.mark.parametrize("kind", ["csv", "csv by digest", "delta"])
def test_late_labels_join_the_feedback(
    storage: Storage, versions: tuple[ModelRef, ModelRef], tmp_path: Path, kind: str
) -> None:
    """From a CSV file or a Delta table, by request or by sha256."""
    log(storage, [answer(number, "ant", "bee") for number in range(12)])
    rows = [{"request_id": f"2026-11-30-{number:04x}", "image": 0, "label": "bee"} for number in range(12)]
    place = tmp_path / "labels.csv"
    if kind == "csv":
        place.write_text("request_id,image,label\n" + "".join(f"{row['request_id']},0,bee\n" for row in rows))
    elif kind == "csv by digest":
        place.write_text("label,sha256\n" + "".join(f"bee,{number:064x}\n" for number in range(12)))
    else:
        place = tmp_path / "labels"
        deltalake.write_deltalake(str(place), pa.Table.from_pylist(rows))
    report = compare(storage, labels=str(place), decide=False)

    assert (report.outcome, report.num_worse) == ("better", 0)
    assert [one.images for one in report.accuracies] == [12, 12]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "which cannot be read"),
        (
            "name,label\na,b\n",
            "which has the columns name, label: give label and sha256, or label, request_id and image",
        ),
        ("sha256,class\na,b\n", "which has the columns sha256, class"),
    ],
)
def test_labels_that_cannot_be_read_are_refused(
    storage: Storage, versions: tuple[ModelRef, ModelRef], tmp_path: Path, content: str | None, sentence: str
) -> None:
    """With the columns that they have."""
    file = tmp_path / "labels.csv"
    if content is not None:
        file.write_text(content)

    with pytest.raises(WrongInput, match=sentence):
        compare(storage, labels=str(file))


def test_a_model_without_a_challenger_is_refused(storage: Storage, logged: tuple[Storage, RunRef, RunRef]) -> None:
    """With the way out."""
    register_again(storage, logged[1], "champion", "challenger")

    with pytest.raises(WrongInput, match="has no version with the alias 'challenger' beside the champion"):
        compare(storage)


def test_a_challenger_that_was_rolled_back_is_not_promoted(
    storage: Storage, versions: tuple[ModelRef, ModelRef], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor one whose champion was replaced meanwhile."""
    log(storage, [answer(number, "ant", "bee") for number in range(12)])
    label(storage, dict.fromkeys(range(12), "bee"))
    models.tag_version(storage, versions[1], {models.ROLLED_BACK_TAG: "version 2 was rolled back"})
    with pytest.raises(WrongInput, match="the challenger is not promoted, since version 2 was rolled back"):
        compare(storage)
    models.untag_version(storage, versions[1], models.ROLLED_BACK_TAG)
    monkeypatch.setattr("tasks.registry.promote.check_predicts", _moves_alias(versions[1]))
    with pytest.raises(WrongInput, match="version 1 is not the champion any more: run the flow compare-live again"):
        compare(storage)
    assert not Path(storage.table("promotions")).exists()


def _moves_alias(version: ModelRef) -> Callable[..., None]:
    return lambda storage, *_others: models.set_alias(storage, version, "champion")


def test_the_flow_returns_the_report(
    storage: Storage, versions: tuple[ModelRef, ModelRef], prefect_harness: None
) -> None:
    """Before there is a request, too."""
    report = compare_flow({"storage": storage.as_config(), "model_name": NAME})

    assert (report.outcome, report.num_compared, report.accuracies) == ("undecided", 0, ())
    assert report.line.endswith("(always-valid p-value 1, alpha 0.05)")
