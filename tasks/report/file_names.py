"""Names of the files that a training run logs to MLflow."""

CLASSES_FILE = "test_classes.json"
MODEL_CARD_FILE = "model_card.md"
LEARNING_CURVES_FILE, CALIBRATION_FILE = "learning_curves.png", "test_calibration.png"
CONFUSION_FILE, MISTAKES_FILE = "test_confusion.png", "test_mistakes.png"
