"""The model package as an MLflow pyfunc, logged as code instead of a pickle."""

from pathlib import Path
from typing import Any

import mlflow
import pandas as pd
from mlflow.pyfunc import PythonModel, PythonModelContext

from tasks.model.classifier import ImageClassifier


class ImagePyfunc(PythonModel):  # type: ignore[misc]  # MLflow is not followed
    """Model from a column `content` of encoded images to the columns label, probability and error."""

    def load_context(self, context: PythonModelContext) -> None:
        """Load the classifier once."""
        self._classifier = ImageClassifier.load(Path(context.artifacts["classifier"]))

    def predict(
        self, context: PythonModelContext, model_input: pd.DataFrame, params: dict[str, Any] | None = None
    ) -> pd.DataFrame:
        """Predict every row of `model_input`."""
        return self._classifier.predict_frame(model_input["content"])


# MLflow executes this file when it logs and loads the model; nothing else imports it.
mlflow.models.set_model(ImagePyfunc())
