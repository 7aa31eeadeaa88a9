"""Features of a frozen backbone stand for its images: the head makes of them what the network makes of these."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tasks.cache.in_memory import InMemoryLoader
from tasks.cache.loader import CacheLoader
from tasks.cache.manifest import CacheManifest, find_cache, open_cache, verify_files
from tasks.collectives import Reducer, SingleProcess
from tasks.metrics.evaluate import Loader, evaluate, evaluate_in_detail
from tasks.model.network import Classifier
from tasks.model.precision import computes_bf16
from tasks.progress.count import Standing, heard_by
from tasks.refs import CacheRef
from tasks.schema import TRAIN, VAL
from tasks.train.features import FORM, feature_loader, materialize_features
from tests.builders.small_network import SMALL
from tests.fakes.thread_ranks import ThreadRanks

CPU = torch.device("cpu")
ROWS = 70

# petastorm leaves its Parquet files to the reference count to close.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")


@pytest.fixture
def cache(make_cache: Callable[..., CacheRef]) -> CacheRef:
    """A cache of noise of 32x32 pixels."""
    return make_cache({TRAIN: ROWS, VAL: 9}, image_size=32)


def materialize(
    cache: CacheRef,
    classifier: Classifier,
    folder: Path,
    precision: torch.dtype | None = None,
    reducer: Reducer | None = None,
) -> tuple[str, CacheManifest]:
    """Make the features of both splits."""
    images = open_cache(cache)
    reducer = reducer or SingleProcess()
    return materialize_features(SMALL, classifier, cache, images, (TRAIN, VAL), str(folder), CPU, precision, reducer)


def by_row(loader: Loader, epoch: int, model: nn.Module) -> dict[int, torch.Tensor]:
    """Return what the model makes of each row of an epoch."""
    return {
        row: output
        for batch in loader.epoch(epoch)
        for row, output in zip(batch.rows_B.tolist(), model(batch.inputs), strict=True)
    }


@pytest.mark.parametrize(
    ("precision", "tolerance"),
    [
        (None, 1e-5),
        # bfloat16 has 8 bits of precision: a relative error of 2^-9 a rounding, over the depth of the network.
        pytest.param(
            torch.bfloat16,
            2e-2,
            marks=pytest.mark.skipif(not computes_bf16(CPU), reason="this CPU has no bfloat16"),
        ),
    ],
)
def test_head_on_features_predicts_as_the_network_on_images(
    cache: CacheRef, classifier: Classifier, tmp_path: Path, precision: torch.dtype | None, tolerance: float
) -> None:
    """Each row gets the same logits either way, within the rounding of the number format."""
    url, features = materialize(cache, classifier, tmp_path, precision)
    with torch.no_grad():
        slow = by_row(CacheLoader(cache.url, open_cache(cache), TRAIN, 6), 0, classifier.eval())
        loader = feature_loader(url, features, TRAIN, 6, seed=3, rank=0, num_ranks=1)
        fast = by_row(loader, 1, classifier.head)

    assert slow.keys() == fast.keys() == set(range(ROWS))
    scale = max(float(output.abs().max()) for output in slow.values())
    assert all(torch.allclose(fast[row], slow[row], rtol=0.0, atol=tolerance * scale) for row in slow)


def test_evaluation_is_the_same_with_and_without_features(
    cache: CacheRef, classifier: Classifier, tmp_path: Path
) -> None:
    """Confusion matrix and loss do not depend on the way."""
    url, features = materialize(cache, classifier, tmp_path)
    slow = evaluate(classifier, CacheLoader(cache.url, open_cache(cache), VAL, 6), 3, CPU, SingleProcess())
    loader = feature_loader(url, features, VAL, 6, seed=None, rank=0, num_ranks=1)
    fast = evaluate(classifier.head, loader, 3, CPU, SingleProcess())

    assert torch.equal(fast.confusion_KK, slow.confusion_KK)
    assert fast.loss == pytest.approx(slow.loss, rel=1e-5)


def test_features_are_made_once_and_found_by_another_process(
    cache: CacheRef, classifier: Classifier, tmp_path: Path
) -> None:
    """The same backbone finds them, whatever its head; other weights, or another precision, make their own."""
    url, features = materialize(cache, classifier, tmp_path)
    runs: list[int] = []
    classifier.network.register_forward_pre_hook(lambda _module, inputs: runs.append(len(inputs[0])))
    nn.init.normal_(classifier.head.weight)

    assert materialize(cache, classifier, tmp_path) == (url, features)
    assert runs == [1]  # To know how many features there are.

    assert materialize(cache, classifier, tmp_path, torch.bfloat16)[0] != url
    with torch.no_grad():
        next(classifier.network.parameters()).mul_(1.5)
    assert materialize(cache, classifier, tmp_path)[0] != url


def test_making_features_says_how_far_it_is(
    make_cache: Callable[..., CacheRef],
    classifier: Classifier,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    messages_of: Callable[[str], list[str]],
) -> None:
    """As often as is due, here after each batch; the first line says what is to be done."""
    monkeypatch.setattr("tasks.train.feature_files.TELL_SECONDS", 0.0)
    monkeypatch.setattr("tasks.progress.count.TELL_SECONDS", 0.0)
    cache = make_cache({TRAIN: 150, VAL: 9}, image_size=32)
    heard: list[Standing] = []
    with caplog.at_level("INFO", "lakevision.train"), heard_by(heard.append):
        url, _features = materialize(cache, classifier, tmp_path)

    assert [(standing.step, standing.done, standing.total) for standing in heard] == [
        ("features", done, 159) for done in (0, 64, 128, 150, 159, 159)
    ]

    messages = messages_of("lakevision.train")
    assert [message.rpartition(", ")[0] for message in messages] == [
        f"{url}: the frozen backbone runs over 159 images",
        "features of 64 of 150 images of the split 'train'",
        "features of 128 of 150 images of the split 'train'",
        "",
    ]
    assert messages[-1] == f"{url}: features of 159 images"


def test_features_of_another_form_of_the_network_are_not_taken(
    cache: CacheRef, classifier: Classifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What older code computed in another way stays where it is, and new features are made beside it."""
    url, features = materialize(cache, classifier, tmp_path)
    monkeypatch.setattr("tasks.train.features.FORM", FORM + 1)
    other_url, other = materialize(cache, classifier, tmp_path)

    assert other_url != url
    assert other.features is not None
    assert other.features.form == FORM + 1
    monkeypatch.undo()
    assert materialize(cache, classifier, tmp_path) == (url, features)


def test_features_are_a_cache_like_any_other(cache: CacheRef, classifier: Classifier, tmp_path: Path) -> None:
    """Files are digested, a damaged one is made again, and nobody takes them for the images."""
    folder = tmp_path / "features"
    url, features = materialize(cache, classifier, folder)
    verify_files(url, features)
    assert features.features is not None
    assert features.features.num_features == 1024
    assert find_cache(str(folder), features.table, features.settings) is None

    file = Path(url, features.splits[VAL].files[0].name)
    file.write_bytes(file.read_bytes()[:-10])
    again_url, again = materialize(cache, classifier, folder)
    assert again_url == url
    verify_files(url, again)


def plain_classifier() -> Classifier:
    """Return one without batch norm: to fold that, torch changes all modules of the process for a moment."""
    torch.manual_seed(5)
    head = nn.Linear(12, 3)
    body = (nn.Conv2d(3, 12, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return Classifier(nn.Sequential(*body, head), head, freeze_backbone=True)


def test_ranks_share_the_work_and_make_the_same_features(cache: CacheRef, tmp_path: Path) -> None:
    """Each writes a file of its own row groups; together they are what one process makes."""
    url, features = materialize(cache, plain_classifier(), tmp_path / "one")
    classifiers = [plain_classifier(), plain_classifier()]

    def rank_main(reducer: Reducer) -> tuple[str, CacheManifest]:
        return materialize(cache, classifiers[reducer.rank], tmp_path / "two", reducer=reducer)

    (shared_url, shared), second = ThreadRanks(2).run(rank_main)

    assert (shared_url, shared) == second
    rows = [file.rows for file in shared.splits[TRAIN].files]
    assert len(rows) == 2
    assert sum(rows) == ROWS
    assert max(rows) < ROWS
    verify_files(shared_url, shared)
    whole = by_row(feature_loader(url, features, TRAIN, 7, seed=None, rank=0, num_ranks=1), 0, nn.Identity())
    joined = by_row(feature_loader(shared_url, shared, TRAIN, 7, seed=None, rank=0, num_ranks=1), 0, nn.Identity())
    assert all(torch.allclose(whole[row], joined[row], atol=1e-5) for row in range(ROWS))


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_held_features_come_in_the_batches_of_the_cache(
    cache: CacheRef, classifier: Classifier, tmp_path: Path, num_ranks: int
) -> None:
    """From memory or from the files, from the start or from the middle of an epoch: the same rows in one order."""
    url, features = materialize(cache, classifier, tmp_path)
    for rank in range(num_ranks):
        held = InMemoryLoader(url, features, TRAIN, 6, seed=3, rank=rank, num_ranks=num_ranks)
        read = CacheLoader(url, features, TRAIN, 6, seed=3, rank=rank, num_ranks=num_ranks)
        assert held.num_steps == read.num_steps
        for epoch, start in ((1, 0), (2, 18)):
            for mine, theirs in zip(held.epoch(epoch, start), read.epoch(epoch, start), strict=True):
                assert mine.rows_B.tolist() == theirs.rows_B.tolist()
                assert torch.equal(mine.inputs, theirs.inputs)
                # Row i of the tiny cache has label i mod 3.
                assert mine.labels_B.tolist() == theirs.labels_B.tolist() == [row % 3 for row in mine.rows_B]


def test_features_can_be_trained_on(cache: CacheRef, classifier: Classifier, tmp_path: Path) -> None:
    """A step of training changes the head and no feature."""
    url, features = materialize(cache, classifier, tmp_path)
    loader = feature_loader(url, features, TRAIN, 6, seed=3, rank=0, num_ranks=1)
    before = by_row(loader, 0, nn.Identity())

    batch = next(iter(loader.epoch(1)))
    nn.functional.cross_entropy(classifier.head(batch.inputs), batch.labels_B).backward()

    assert next(classifier.head.parameters()).grad is not None
    after = by_row(loader, 2, nn.Identity())
    assert all(torch.equal(before[row], after[row]) for row in before)


def test_mistakes_are_the_same_rows_with_and_without_features(
    cache: CacheRef, classifier: Classifier, tmp_path: Path
) -> None:
    """A batch of features knows its rows, from which the images are found again."""
    url, features = materialize(cache, classifier, tmp_path)
    loader = feature_loader(url, features, VAL, 6, seed=None, rank=0, num_ranks=1)
    slow = evaluate_in_detail(classifier, CacheLoader(cache.url, open_cache(cache), VAL, 6), 3, CPU, SingleProcess())
    fast = evaluate_in_detail(classifier.head, loader, 3, CPU, SingleProcess())

    assert len(fast.mistakes) == 9 - int(slow.confusion_KK.diagonal().sum()) > 0
    assert {mistake.row for mistake in fast.mistakes} == {mistake.row for mistake in slow.mistakes}
    assert fast.calibration.error == pytest.approx(slow.calibration.error, rel=1e-3)


def test_features_of_jpeg_images_are_read_as_features(
    make_cache: Callable[..., CacheRef], classifier: Classifier, tmp_path: Path
) -> None:
    """Their manifest is that of the images, and says how those are stored."""
    url, features = materialize(make_cache({TRAIN: ROWS, VAL: 9}, image_size=32, format="jpeg"), classifier, tmp_path)

    held = by_row(feature_loader(url, features, TRAIN, 7, seed=None, rank=0, num_ranks=1), 0, nn.Identity())
    read = by_row(CacheLoader(url, features, TRAIN, 7), 0, nn.Identity())

    assert held.keys() == read.keys() == set(range(ROWS))
    assert all(torch.equal(held[row], read[row]) and len(held[row]) == 1024 for row in held)
