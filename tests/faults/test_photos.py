"""The DAG on real photos that trains in one process and on two ranks: the longer variant of the test in tests/e2e."""

import pytest

from tests.builders.photo_dag import run_photo_dag


@pytest.mark.timeout(1800)
def test_both_training_runs_on_photos_reach_the_accuracy_of_a_linear_probe(test_data, tmp_path):
    """220 photos are grayscale; two ranks train in place, since no server has a work pool."""
    summary, printed = run_photo_dag(test_data / "photos", test_data, tmp_path, "both")
    num_photos = sum(1 for _ in (test_data / "photos").glob("*/*.jpg"))
    assert (summary.images, summary.quarantined, summary.duplicates) == (num_photos, 0, 0)
    assert sum(summary.cache_rows.values()) == num_photos
    assert (summary.predictions, summary.prediction_errors) == (num_photos, 0)
    assert summary.single.val_accuracy >= 0.95
    assert summary.distributed.val_accuracy >= 0.95
    # Three seeds gave 0.966 to 0.968.
    assert summary.single.test_accuracy >= 0.955
    assert summary.distributed.test_accuracy >= 0.955
    assert "2 ranks train in place" in printed
