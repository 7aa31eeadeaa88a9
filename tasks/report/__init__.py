"""Artifacts of a training run: figures, tables, event file and model card, with the names of their files in MLflow."""

CLASSES_FILE = "test_classes.json"
MODEL_CARD_FILE = "model_card.md"
LEARNING_CURVES_FILE, CALIBRATION_FILE = "learning_curves.png", "test_calibration.png"
UNKNOWN_FILE = "unknown_scores.png"
CONFUSION_FILE, MISTAKES_FILE = "test_confusion.png", "test_mistakes.png"
MISTAKES_TABLE = "test_mistakes.json"
IMAGES_FILE = "train_images.png"

CAPTIONS = {
    MISTAKES_FILE: "Which images it gets wrong",
    CONFUSION_FILE: "Confusion on the test images",
    LEARNING_CURVES_FILE: "Learning curves",
    CALIBRATION_FILE: "Calibration",
    UNKNOWN_FILE: "Images called unknown",
    IMAGES_FILE: "Images of each class",
}
"""The figures of a result page, in its order, with their headings."""
