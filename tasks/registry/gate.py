"""The promotion gate: which run is the best, and whether it beats the champion, as pure decisions."""

from collections.abc import Mapping

from tasks.errors import WrongInput
from tasks.tracking import EvaluatedRun

ROUNDING = 1e-6
"""Accuracies that differ by at most this are equal: training runs record float32 values, which round 1/3."""


def choose_best(test_accuracies: Mapping[str, float], min_test_accuracy: float) -> str:
    """Return the run with the highest test accuracy, of equal runs the first.

    This is the first decision that uses the split `test`: training stops by the split `val`.

    Args:
        test_accuracies: Accuracy (0-1) by MLflow run id.
        min_test_accuracy: Minimum accuracy for a promotion.

    Raises:
        WrongInput: The best accuracy is below the minimum.
    """
    best = max(test_accuracies, key=lambda run_id: test_accuracies[run_id])
    if test_accuracies[best] < min_test_accuracy:
        raise WrongInput(
            f"the best of {len(test_accuracies)} runs has test accuracy {test_accuracies[best]:.4f}, below "
            f"promote.min_test_accuracy {min_test_accuracy}: train a better model or lower that minimum; the "
            "champion is unchanged"
        )
    return best


def check_comparable(challenger: EvaluatedRun, champion: EvaluatedRun, name: str, *, is_given: bool) -> None:
    """Check that challenger and champion can be compared: models of different tables have different test images.

    Args:
        challenger: The challenger.
        champion: The champion.
        name: Name of the registered model.
        is_given: Whether the name is from `promote.model_name`; else it was derived from the table.

    Raises:
        WrongInput: The champion was trained on another table with other images.
    """
    if challenger.same_table(champion) or challenger.same_content(champion) or challenger.is_served_by(champion):
        return
    path = "" if champion.table is None else f" ('{champion.table.path}')"
    way_out = ", or leave it empty for a name derived from the table" if is_given else ""
    raise WrongInput(
        f"the champion of the registered model '{name}' was trained on another table{path}, so the two cannot be "
        f"compared: set promote.model_name to another name{way_out}"
    )


def is_better(challenger: float, champion: float) -> bool:
    """Return whether a challenger's accuracy is higher than the champion's by more than ROUNDING."""
    return challenger - champion > ROUNDING


def is_older(challenger: EvaluatedRun, champion: EvaluatedRun) -> bool:
    """Return whether the challenger was trained on an older version of the champion's table."""
    if not challenger.same_table(champion) or challenger.same_content(champion):
        return False
    assert challenger.table is not None, "tables that are the same are known"
    assert champion.table is not None, "tables that are the same are known"
    return challenger.table.version < champion.table.version
