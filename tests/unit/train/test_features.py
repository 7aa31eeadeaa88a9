"""Cached features of a frozen backbone, compared with the network on images."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tasks.cache.loader import CacheLoader, InMemoryLoader
from tasks.cache.manifest import CacheManifest, find_cache, open_cache, verify_files
from tasks.cache.order import VirtualRanks
from tasks.collectives.reducer import Reducer
from tasks.config.storage import StorageConfig
from tasks.config.train import TrainConfig
from tasks.metrics.evaluate import evaluate, evaluate_in_detail
from tasks.model.training_network import Classifier
from tasks.model_package.description import IMAGENET_MEAN
from tasks.model_package.serving import computes_bf16
from tasks.progress.count import StepProgress, listener
from tasks.refs import TRAIN, VAL, CacheRef
from tasks.storage import resolve_storage
from tasks.train.context import TrainingContext
from tasks.train.features import FORM, materialize_features
from tasks.train.spec import TrainingSpec
from tests.builders.small_network import SMALL
from tests.fakes.thread_ranks import ThreadRanks

CPU = torch.device("cpu")
ROWS = 70


@pytest.fixture
def cache(make_cache: Callable[..., CacheRef]) -> CacheRef:
    """Return a cache of noise of 32x32 pixels."""
    return make_cache({TRAIN: ROWS, VAL: 9}, image_size=32)


def materialize(
    cache: CacheRef,
    classifier: Classifier,
    folder: Path,
    precision: torch.dtype | None = None,
    reducer: Reducer | None = None,
) -> tuple[str, CacheManifest]:
    """Compute the features of both splits."""
    storage = resolve_storage(StorageConfig(home=str(folder), cache=str(folder)))
    spec = TrainingSpec(train=TrainConfig(model=SMALL), cache=cache, storage=storage)
    context = TrainingContext(spec, open_cache(cache), classifier, CPU, reducer or Reducer())
    context.precision = precision
    return materialize_features(context, (TRAIN, VAL))


def by_row(loader: CacheLoader, epoch: int, model: nn.Module) -> dict[int, torch.Tensor]:
    """Return the model's output for each row of an epoch."""
    return {
        row: output
        for batch in loader.epoch(epoch)
        for row, output in zip(batch.rows_B.tolist(), model(batch.inputs), strict=True)
    }


@pytest.mark.parametrize("images_per_pass", [100, 10])
@pytest.mark.parametrize(
    ("precision", "tolerance"),
    [
        (None, 1e-5),
        # bfloat16 has 8 bits of precision: a relative error of 2^-9 per rounding, over the depth of the network.
        pytest.param(
            torch.bfloat16,
            2e-2,
            marks=pytest.mark.skipif(not computes_bf16(CPU), reason="this CPU has no bfloat16"),
        ),
    ],
)
def test_head_on_features_equals_network_on_images(
    cache: CacheRef,
    classifier: Classifier,
    tmp_path: Path,
    precision: torch.dtype | None,
    tolerance: float,
    images_per_pass: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both give the same logits for each row, within the rounding of the number format, also in several passes."""
    monkeypatch.setattr("tasks.model_package.serving.PIXELS_PER_PASS", images_per_pass * 32 * 32)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    url, features = materialize(cache, classifier, tmp_path, precision)
    with torch.no_grad():
        on_images = by_row(CacheLoader(cache.url, open_cache(cache), TRAIN, 6), 0, classifier.eval())
        loader = InMemoryLoader(url, features, TRAIN, 6, seed=3)
        on_features = by_row(loader, 1, classifier.head)

    assert on_images.keys() == on_features.keys() == set(range(ROWS))
    scale = max(float(output.abs().max()) for output in on_images.values())
    assert all(torch.allclose(on_features[row], on_images[row], rtol=0.0, atol=tolerance * scale) for row in on_images)


def test_classifier_that_is_not_folded_stays_as_it_is(make_cache: Callable[..., CacheRef], tmp_path: Path) -> None:
    """A network without batch norms is its own folded form, and is trained with its own settings afterwards."""
    classifier = plain_classifier()
    materialize(make_cache({TRAIN: 9, VAL: 9}, image_size=32), classifier, tmp_path, torch.bfloat16)

    assert (classifier.precision, classifier.pixels_per_pass) == (None, None)


def test_evaluation_on_features_equals_evaluation_on_images(
    cache: CacheRef, classifier: Classifier, tmp_path: Path
) -> None:
    """Confusion matrix and loss are the same with and without features."""
    url, features = materialize(cache, classifier, tmp_path)
    on_images = evaluate(classifier, CacheLoader(cache.url, open_cache(cache), VAL, 6), 3, CPU, Reducer())
    loader = InMemoryLoader(url, features, VAL, 6, seed=None)
    on_features = evaluate(classifier.head, loader, 3, CPU, Reducer())

    assert torch.equal(on_features.confusion_KK, on_images.confusion_KK)
    assert on_features.loss == pytest.approx(on_images.loss, rel=1e-5)


def test_features_are_computed_once_per_backbone(cache: CacheRef, classifier: Classifier, tmp_path: Path) -> None:
    """The same backbone finds its features with any head; other weights, mean or precision get their own."""
    url, features = materialize(cache, classifier, tmp_path)
    runs: list[int] = []
    classifier.network.register_forward_pre_hook(lambda _module, inputs: runs.append(len(inputs[0])))
    nn.init.normal_(classifier.head.weight)

    assert materialize(cache, classifier, tmp_path) == (url, features)
    assert runs == []

    assert materialize(cache, classifier, tmp_path, torch.bfloat16)[0] != url
    classifier.mean = (0.5, 0.5, 0.5)
    assert materialize(cache, classifier, tmp_path)[0] != url
    classifier.mean = IMAGENET_MEAN
    assert materialize(cache, classifier, tmp_path)[0] == url
    with torch.no_grad():
        next(classifier.network.parameters()).mul_(1.5)
    assert materialize(cache, classifier, tmp_path)[0] != url


def test_progress_of_computing_features_is_logged(
    make_cache: Callable[..., CacheRef],
    classifier: Classifier,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    messages_of: Callable[[str], list[str]],
) -> None:
    """Progress is reported and logged at each interval, here after each batch."""
    monkeypatch.setattr("tasks.train.features.LOG_SECONDS", 0.0)
    monkeypatch.setattr("tasks.progress.count.UPDATE_SECONDS", 0.0)
    cache = make_cache({TRAIN: 150, VAL: 9}, image_size=32)
    reports: list[StepProgress] = []
    with caplog.at_level("INFO", "lakevision.train"), listener(reports.append):
        url, _features = materialize(cache, classifier, tmp_path)

    assert [(report.step, report.done, report.total) for report in reports] == [
        ("features", done, 159) for done in (0, 64, 128, 150, 159, 159)
    ]

    messages = messages_of("lakevision.train")
    assert [message.rpartition(", ")[0] for message in messages] == [
        f"{url}: running the frozen backbone over 159 images",
        "features of 64 of 150 images of the split 'train'",
        "features of 128 of 150 images of the split 'train'",
        "",
    ]
    assert messages[-1] == f"{url}: features of 159 images"


def test_features_of_another_version_of_the_folded_network_are_not_used(
    cache: CacheRef, classifier: Classifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Features of an older version are kept, and new ones are computed in another folder."""
    url, features = materialize(cache, classifier, tmp_path)
    monkeypatch.setattr("tasks.train.features.FORM", FORM + 1)
    other_url, other = materialize(cache, classifier, tmp_path)

    assert other_url != url
    assert other.features is not None
    assert other.features.form == FORM + 1
    monkeypatch.undo()
    assert materialize(cache, classifier, tmp_path) == (url, features)


def test_features_are_verified_like_other_caches(cache: CacheRef, classifier: Classifier, tmp_path: Path) -> None:
    """Files have digests, a damaged file is rebuilt, and features are not found as a cache of images."""
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
    """Return a classifier without batch norm, since folding temporarily changes all modules of the process."""
    torch.manual_seed(5)
    head = nn.Linear(12, 3)
    body = (nn.Conv2d(3, 12, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return Classifier(nn.Sequential(*body, head), head, freeze_backbone=True)


def test_features_of_ranks_equal_those_of_one_process(cache: CacheRef, tmp_path: Path) -> None:
    """Each rank writes a file with its row groups, which together equal the features of one process."""
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
    expected = by_row(InMemoryLoader(url, features, TRAIN, 7, seed=None), 0, nn.Identity())
    joined = by_row(InMemoryLoader(shared_url, shared, TRAIN, 7, seed=None), 0, nn.Identity())
    assert all(torch.allclose(expected[row], joined[row], atol=1e-5) for row in range(ROWS))


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_batches_from_memory_equal_those_from_the_cache(
    cache: CacheRef, classifier: Classifier, tmp_path: Path, num_ranks: int
) -> None:
    """Both loaders yield the same rows in the same order, from the start and from the middle of an epoch."""
    url, features = materialize(cache, classifier, tmp_path)
    for rank in range(num_ranks):
        in_memory = InMemoryLoader(url, features, TRAIN, 6, seed=3, ranks=VirtualRanks.of(rank, num_ranks))
        from_files = CacheLoader(url, features, TRAIN, 6, seed=3, ranks=VirtualRanks.of(rank, num_ranks))
        assert in_memory.num_steps == from_files.num_steps
        for epoch, start in ((1, 0), (2, 18)):
            for batch, expected in zip(in_memory.epoch(epoch, start), from_files.epoch(epoch, start), strict=True):
                assert batch.rows_B.tolist() == expected.rows_B.tolist()
                assert torch.equal(batch.inputs, expected.inputs)
                # Row i of the tiny cache has label i mod 3.
                assert batch.labels_B.tolist() == expected.labels_B.tolist() == [row % 3 for row in batch.rows_B]


def test_training_on_features_changes_only_the_head(cache: CacheRef, classifier: Classifier, tmp_path: Path) -> None:
    """The head gets gradients, and the features stay the same."""
    url, features = materialize(cache, classifier, tmp_path)
    loader = InMemoryLoader(url, features, TRAIN, 6, seed=3)
    before = by_row(loader, 0, nn.Identity())

    batch = next(iter(loader.epoch(1)))
    nn.functional.cross_entropy(classifier.head(batch.inputs), batch.labels_B).backward()

    assert next(classifier.head.parameters()).grad is not None
    after = by_row(loader, 2, nn.Identity())
    assert all(torch.equal(before[row], after[row]) for row in before)


def test_mistakes_on_features_are_the_same_rows_as_on_images(
    cache: CacheRef, classifier: Classifier, tmp_path: Path
) -> None:
    """Batches of features have the row numbers of their images."""
    url, features = materialize(cache, classifier, tmp_path)
    loader = InMemoryLoader(url, features, VAL, 6, seed=None)
    on_images = evaluate_in_detail(classifier, CacheLoader(cache.url, open_cache(cache), VAL, 6), 3, CPU, Reducer())
    on_features = evaluate_in_detail(classifier.head, loader, 3, CPU, Reducer())

    assert len(on_features.mistakes) == 9 - int(on_images.confusion_KK.diagonal().sum()) > 0
    assert {mistake.row for mistake in on_features.mistakes} == {mistake.row for mistake in on_images.mistakes}
    assert on_features.calibration.error == pytest.approx(on_images.calibration.error, rel=1e-3)


def test_features_of_a_jpeg_cache_are_read_as_vectors(
    make_cache: Callable[..., CacheRef], classifier: Classifier, tmp_path: Path
) -> None:
    """Features are read as float vectors, although their manifest has the JPEG format of the images."""
    url, features = materialize(make_cache({TRAIN: ROWS, VAL: 9}, image_size=32, format="jpeg"), classifier, tmp_path)

    in_memory = by_row(InMemoryLoader(url, features, TRAIN, 7, seed=None), 0, nn.Identity())
    from_files = by_row(CacheLoader(url, features, TRAIN, 7), 0, nn.Identity())

    assert in_memory.keys() == from_files.keys() == set(range(ROWS))
    assert all(torch.equal(in_memory[row], from_files[row]) and len(in_memory[row]) == 1024 for row in in_memory)
