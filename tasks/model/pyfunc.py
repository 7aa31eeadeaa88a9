"""What MLflow loads: the model package as a pyfunc, from this code and not from a pickle."""

from pathlib import Path
from typing import Any

import mlflow
import pandas as pd
from mlflow.pyfunc import PythonModel, PythonModelContext

from tasks.model.classifier import ImageClassifier


class ImagePyfunc(PythonModel):  # type: ignore[misc]  # MLflow is not followed
    """A column `content` of encoded images in, columns label, probability and error out."""

    def load_context(self, context: PythonModelContext) -> None:
        """Load the weights, once."""
        self._classifier = ImageClassifier.load(Path(context.artifacts["classifier"]))

    def predict(
        self, context: PythonModelContext, model_input: pd.DataFrame, params: dict[str, Any] | None = None
    ) -> pd.DataFrame:
        """Predict every row of `model_input`."""
        return self._classifier.predict_frame(model_input["content"])


# MLflow executes this file when it logs and when it loads; nothing else imports it.
mlflow.models.set_model(ImagePyfunc())
