"""Artifacts of a training run: figures, tables, event file and model card, with the names of their files in MLflow."""

CLASSES_FILE = "test_classes.json"
MODEL_CARD_FILE = "model_card.md"
LEARNING_CURVES_FILE, CALIBRATION_FILE = "learning_curves.png", "test_calibration.png"
CONFUSION_FILE, MISTAKES_FILE = "test_confusion.png", "test_mistakes.png"

FIGURE_FILES = (LEARNING_CURVES_FILE, CALIBRATION_FILE, CONFUSION_FILE, MISTAKES_FILE)
"""The figures of a Prefect artifact, in its order."""
