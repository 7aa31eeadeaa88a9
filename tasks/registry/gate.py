"""Which run is promoted: a pure decision on numbers."""

from collections.abc import Mapping

from tasks.errors import WrongInput


def choose_best(test_accuracies: Mapping[str, float], min_test_accuracy: float) -> str:
    """Return the run with the highest accuracy on the split `test`, which chose nothing before; the first among equals.

    Args:
        test_accuracies: Accuracy (0-1) by MLflow run id.
        min_test_accuracy: The gate: below it nothing is promoted.

    Raises:
        WrongInput: No run passes the gate.
    """
    best = max(test_accuracies, key=lambda run_id: test_accuracies[run_id])
    if test_accuracies[best] < min_test_accuracy:
        raise WrongInput(
            f"the best of {len(test_accuracies)} runs has test accuracy {test_accuracies[best]:.4f}, below "
            f"promote.min_test_accuracy {min_test_accuracy}: train better or lower the gate; the champion is as it was"
        )
    return best
