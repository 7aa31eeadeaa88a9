"""The number of challengers that the same test images have judged."""

from hashlib import sha256

import pytest

from tasks.refs import RunRef
from tasks.registry.judged import JUDGED_TAG, NUM_SAMPLED, note_judged, similarity
from tasks.storage import Storage

TAGS: dict[str, dict[str, str]] = {}
"""The tags of registered models, in place of those in MLflow."""


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the tags in this process."""
    TAGS.clear()
    monkeypatch.setattr("tasks.tracking.models.model_tags", lambda _storage, name: dict(TAGS.get(name, {})))
    monkeypatch.setattr(
        "tasks.tracking.models.tag_model",
        lambda _storage, name, tag, value: TAGS.setdefault(name, {}).update({tag: value}),
    )


def sample(images: range) -> tuple[str, ...]:
    """Return the smallest hashes of some images."""
    return tuple(sorted(sha256(str(number).encode()).hexdigest()[:8] for number in images)[:NUM_SAMPLED])


def judge(storage: Storage, run: int, images: range | None = None, content: str = "", name: str = "photos") -> int:
    """Let images judge a run."""
    keys = () if images is None else sample(images)
    return note_judged(storage, name, RunRef(run_id=f"{run:032x}"), content, keys)


def test_number_of_challengers_grows_by_one_for_each(storage: Storage) -> None:
    """A challenger that is judged again keeps its number; another model has its own."""
    assert [judge(storage, run, range(100)) for run in (1, 2, 2, 1, 3, 2)] == [1, 2, 2, 1, 3, 2]
    assert judge(storage, 1, range(100), name="other") == 1
    assert len(TAGS["photos"]) == 3


def test_most_images_make_the_same_set(storage: Storage) -> None:
    """Images that are added or removed start nothing anew; mostly other images do, also for a run judged before."""
    assert judge(storage, 1, range(100)) == 1
    assert judge(storage, 2, range(5, 110)) == 2
    assert judge(storage, 3, range(1000, 1100)) == 1
    assert judge(storage, 1, range(1000, 1100)) == 2
    assert judge(storage, 4, range(1000, 1101)) == 3


def test_set_without_a_table_is_known_by_its_digest(storage: Storage) -> None:
    """The same digest is the same set, with or without a sample of it. Sets of which nothing is known are one set."""
    assert judge(storage, 1, None, "content") == 1
    assert judge(storage, 2, range(100), "content") == 2
    assert judge(storage, 3, range(100)) == 2
    assert [judge(storage, run) for run in (4, 5, 4, 6)] == [1, 2, 1, 3]
    assert judge(storage, 7, None, "other content") == 1


def test_invalid_tag_is_ignored(storage: Storage, caplog: pytest.LogCaptureFixture) -> None:
    """It is named in a warning, and replaced when its challenger is judged again."""
    TAGS["photos"] = {f"{JUDGED_TAG}{1:032x}": "[]", "lakevision.champion": "1"}
    assert judge(storage, 2, range(100)) == 1
    assert f"the tag {JUDGED_TAG}{1:032x} of 'photos' in MLflow is not valid: it is ignored" in "\n".join(
        caplog.messages
    )
    assert judge(storage, 1, range(100)) == 2


def test_similarity_is_the_share_of_images_in_both() -> None:
    """It is exact for small sets, and an estimate for large ones."""
    assert similarity((), ()) == 0.0
    assert similarity(sample(range(4)), sample(range(2, 6))) == pytest.approx(2 / 6)
    assert similarity(sample(range(10_000)), sample(range(10_000))) == 1.0
    assert similarity(sample(range(10_000)), sample(range(5_000, 10_000))) == pytest.approx(0.5, abs=0.18)
