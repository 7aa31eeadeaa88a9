"""The trial of a version before its promotion, in the process of the test."""

import sys
from pathlib import Path
from unittest.mock import patch

from tasks.model_package.description import InvalidPackage
from tasks.registry import trial_prediction


def predict_here(folder: Path) -> str | None:
    """Predict an image as `aliases.predict_once` does, without its fresh process, which takes seconds to load torch."""
    with patch.object(sys, "argv", ["trial_prediction", str(folder)]):
        try:
            trial_prediction.main()
        except InvalidPackage as error:
            return str(error)
    return None
