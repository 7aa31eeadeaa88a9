"""Features of a frozen backbone stand for its pictures: the head makes of them what the network makes of these."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torchvision
from torch import nn

from tasks.cache.loader import CacheLoader
from tasks.cache.manifest import open_cache
from tasks.refs import CacheRef
from tasks.train.evaluate import Loader, evaluate, evaluate_in_detail
from tasks.train.features import FeatureLoader, ends_in_head
from tasks.train.model import Classifier, build_classifier
from tasks.train.reduce import SingleProcess

CPU = torch.device("cpu")
SMALL = "shufflenet_v2_x0_5"
ROWS = 20

# petastorm leaves its Parquet files to the reference count to close.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state dict of SMALL, drawn at random: stands for pretrained weights."""
    torch.manual_seed(11)
    path = tmp_path_factory.mktemp("weights") / "small.pt"
    torch.save(torchvision.models.get_model(SMALL, weights=None).state_dict(), path)
    return path


@pytest.fixture
def classifier(weights: Path) -> Classifier:
    """A frozen classifier whose head prefers no class."""
    torch.manual_seed(2)
    return build_classifier(SMALL, str(weights), num_classes=3, freeze_backbone=True)


@pytest.fixture
def cache(make_cache: Callable[..., CacheRef]) -> CacheRef:
    """A cache of 20 rows of noise of 32x32 pixels."""
    return make_cache({"train": ROWS}, image_size=32)


def pictures_of(cache: CacheRef, seed: int | None = None, rank: int = 0, num_ranks: int = 1) -> CacheLoader:
    """Return the loader that reads pictures."""
    return CacheLoader(cache.url, open_cache(cache), "train", 6, seed=seed, rank=rank, num_ranks=num_ranks)


def features_of(
    cache: CacheRef, classifier: Classifier, seed: int | None = None, rank: int = 0, num_ranks: int = 1
) -> FeatureLoader:
    """Return the loader that gives features instead."""
    return FeatureLoader(pictures_of(cache, seed, rank, num_ranks), classifier, CPU, seed)


def by_row(loader: Loader, epoch: int, model: nn.Module) -> dict[int, torch.Tensor]:
    """Return what the model makes of each row of an epoch."""
    return {
        row: output
        for batch in loader.epoch(epoch)
        for row, output in zip(batch.rows_B.tolist(), model(batch.inputs), strict=True)
    }


def test_head_on_features_predicts_as_the_network_on_pictures(cache: CacheRef, classifier: Classifier) -> None:
    """Each row gets the same logits either way."""
    with torch.no_grad():
        slow = by_row(pictures_of(cache), 0, classifier.eval())
        fast = by_row(features_of(cache, classifier, seed=3), 1, classifier.head)

    assert slow.keys() == fast.keys() == set(range(ROWS))
    assert all(torch.allclose(fast[row], slow[row], rtol=1e-4, atol=1e-5) for row in slow)


def test_evaluation_is_the_same_with_and_without_features(cache: CacheRef, classifier: Classifier) -> None:
    """Confusion matrix and loss do not depend on the way."""
    slow = evaluate(classifier, pictures_of(cache), 3, CPU, SingleProcess())
    fast = evaluate(classifier.head, features_of(cache, classifier), 3, CPU, SingleProcess())

    assert torch.equal(fast.confusion_KK, slow.confusion_KK)
    assert fast.loss == pytest.approx(slow.loss, rel=1e-5)


def test_features_are_those_of_the_first_epoch_and_can_be_trained_on(cache: CacheRef, classifier: Classifier) -> None:
    """A step of training changes the head and no feature, and the backbone does not run again."""
    loader = features_of(cache, classifier, seed=3)
    before = by_row(loader, 0, nn.Identity())
    runs: list[int] = []
    classifier.network.register_forward_pre_hook(lambda _module, _inputs: runs.append(1))

    batch = next(iter(loader.epoch(1)))
    nn.functional.cross_entropy(classifier.head(batch.inputs), batch.labels_B).backward()

    assert next(classifier.head.parameters()).grad is not None
    after = by_row(loader, 2, nn.Identity())
    assert before.keys() == after.keys()
    assert all(torch.equal(before[row], after[row]) for row in before)
    assert not runs


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_every_row_comes_once_an_epoch(cache: CacheRef, classifier: Classifier, num_ranks: int) -> None:
    """Over all ranks each row comes once, in the steps and numbers that the picture loader promises."""
    loaders = [features_of(cache, classifier, 3, rank, num_ranks) for rank in range(num_ranks)]
    pictures = pictures_of(cache, 3, 0, num_ranks)

    ranks = [list(loader.epoch(1)) for loader in loaders]

    rows = [row for batches in ranks for batch in batches for row in batch.rows_B.tolist()]
    assert sorted(rows) == list(range(ROWS))
    assert {len(batches) for batches in ranks} == {pictures.num_steps}
    for step in range(pictures.num_steps):
        expected = pictures.num_global_rows(step)
        assert sum(len(batches[step].labels_B) for batches in ranks) == expected == loaders[0].num_global_rows(step)


def test_labels_belong_to_their_rows(cache: CacheRef, classifier: Classifier) -> None:
    """Row i of the tiny cache has label i mod 3, also after shuffling."""
    for batch in features_of(cache, classifier, seed=3).epoch(1):
        assert batch.labels_B.tolist() == [row % 3 for row in batch.rows_B.tolist()]


def test_epochs_are_shuffled_by_seed_and_number(cache: CacheRef, classifier: Classifier) -> None:
    """The same seed and epoch give the same order, another epoch another, and no seed the order of the rows."""

    def order(loader: FeatureLoader, epoch: int) -> list[int]:
        return [row for batch in loader.epoch(epoch) for row in batch.rows_B.tolist()]

    first, again = features_of(cache, classifier, seed=3), features_of(cache, classifier, seed=3)
    assert order(first, 1) == order(again, 1)
    assert order(first, 1) != order(first, 2)
    assert order(features_of(cache, classifier), 5) == list(range(ROWS))


def test_order_does_not_depend_on_how_pictures_were_read(cache: CacheRef, classifier: Classifier) -> None:
    """Features are drawn from in the order of their rows, so that a larger pool or more threads train the same."""
    orders = []
    for reading_seed in (1, 2):
        loader = FeatureLoader(pictures_of(cache, reading_seed), classifier, CPU, seed=3)
        orders.append([row for batch in loader.epoch(1) for row in batch.rows_B.tolist()])

    assert orders[0] == orders[1]


def test_pooled_classifier_ends_in_its_head(classifier: Classifier) -> None:
    """The logits of a network that ends in a linear layer are its output, so that features can stand for pictures."""
    pictures = torch.randint(0, 256, (2, 32, 32, 3), dtype=torch.uint8)

    assert ends_in_head(classifier, pictures)
    assert not classifier.head._forward_hooks


def test_squeezenet_does_not_end_in_its_head() -> None:
    """Squeezenet applies ReLU and pooling to what its last layer gives: its features are not cached."""
    squeezenet = build_classifier("squeezenet1_1", "none", num_classes=3, freeze_backbone=True)
    pictures = torch.randint(0, 256, (2, 64, 64, 3), dtype=torch.uint8)

    assert not ends_in_head(squeezenet, pictures)
    assert not squeezenet.head._forward_hooks


def test_network_that_changes_its_head_s_output_does_not_end_in_it() -> None:
    """A ReLU behind a linear layer makes other logits than the layer, whatever its shape."""
    head = nn.Linear(12, 3)
    pictures = torch.randint(0, 256, (8, 2, 2, 3), dtype=torch.uint8)

    plain = Classifier(nn.Sequential(nn.Flatten(), head), head, freeze_backbone=True)
    changing = Classifier(nn.Sequential(nn.Flatten(), head, nn.ReLU()), head, freeze_backbone=True)

    assert ends_in_head(plain, pictures)
    assert not ends_in_head(changing, pictures)


def test_mistakes_are_the_same_rows_with_and_without_features(cache: CacheRef, classifier: Classifier) -> None:
    """A batch of features knows its rows, from which the pictures are found again."""
    slow = evaluate_in_detail(classifier, pictures_of(cache), 3, CPU, SingleProcess())
    fast = evaluate_in_detail(classifier.head, features_of(cache, classifier), 3, CPU, SingleProcess())

    assert len(fast.mistakes) == ROWS - int(slow.confusion_KK.diagonal().sum()) > 0
    assert {mistake.row for mistake in fast.mistakes} == {mistake.row for mistake in slow.mistakes}
    assert fast.calibration.error == pytest.approx(slow.calibration.error, rel=1e-3)
