"""The DAG on real photos with pretrained weights, called as a Python function."""

import pytest

from tests.builders.photo_dag import half_of_each_class, run_photo_dag


@pytest.mark.timeout(1800)
def test_photos_reach_the_accuracy_of_a_linear_probe_and_none_is_lost(test_data, tmp_path):
    """One class is grayscale as a whole; tests/faults has all photos, and trains in a single process as well."""
    photos = half_of_each_class(test_data / "photos", tmp_path / "photos")
    summary, printed = run_photo_dag(photos, test_data, tmp_path, "distributed")
    num_photos = sum(1 for _ in photos.glob("*/*.jpg"))
    assert (summary.images, summary.quarantined, summary.duplicates) == (num_photos, 0, 0)
    assert sum(summary.cache_rows.values()) == num_photos
    assert summary.predictions == num_photos
    assert summary.prediction_errors == 0
    assert summary.distributed.val_accuracy >= 0.95
    # Of fewer than 200 images; all photos have the narrower limit of tests/faults.
    assert summary.distributed.test_accuracy >= 0.94
    assert "2 ranks train in place" in printed
