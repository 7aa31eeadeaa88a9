"""Temperature and scores that are fitted on the split `val` at the end of a training run."""

from collections.abc import Callable

import pytest
import torch

from tasks.cache.loader import CacheLoader
from tasks.cache.manifest import open_cache
from tasks.collectives.reducer import Reducer
from tasks.config.storage import StorageConfig
from tasks.config.train import TrainConfig
from tasks.model.training_network import build_classifier
from tasks.model_package.serving import serving_network, unknown_scores
from tasks.refs import TEST, TRAIN, VAL, CacheRef
from tasks.storage import resolve_storage
from tasks.train.context import TrainingContext
from tasks.train.serving_form import ServingEvaluation, evaluate_serving_form
from tasks.train.spec import TrainingSpec
from tests.builders.small_network import SMALL

CPU = torch.device("cpu")


def evaluated(cache: CacheRef) -> ServingEvaluation:
    """Return the evaluation of an untrained network whose predictions differ between images."""
    spec = TrainingSpec(train=TrainConfig(model=SMALL), cache=cache, storage=resolve_storage(StorageConfig()))
    return evaluate_serving_form(TrainingContext(spec, open_cache(cache), CLASSIFIER, CPU, Reducer()))


torch.manual_seed(4)
CLASSIFIER = build_classifier(SMALL, "none", 3, freeze_backbone=False)
with torch.no_grad():
    CLASSIFIER.head.weight.normal_(std=3.0)
    CLASSIFIER.train()(torch.randint(0, 256, (16, 32, 32, 3), dtype=torch.uint8))
CLASSIFIER.eval()


def test_scores_are_those_of_the_served_network_without_its_temperature(make_cache: Callable[..., CacheRef]) -> None:
    """Each image of `val` and of `test` has its score once; thresholds follow from those of `val`."""
    cache = make_cache({TRAIN: 9, VAL: 30, TEST: 13}, image_size=32)
    found = evaluated(cache)

    assert abs(found.temperature - 1) > 0.1
    served = serving_network(CLASSIFIER, "float32", temperature=1)
    for split, scores in ((VAL, found.scores), (TEST, found.evaluation.scores)):
        loader = CacheLoader(cache.url, open_cache(cache), split, 64)
        with torch.inference_mode():
            expected = unknown_scores(torch.cat([served(batch.inputs) for batch in loader.epoch(0)]))
        assert scores.ascending.tolist() == pytest.approx(expected.sort().values.tolist(), abs=1e-5)
    thresholds = found.scores.thresholds()
    assert thresholds is not None
    assert 0 < thresholds[-1] < thresholds[-2] < thresholds[0] == 1
