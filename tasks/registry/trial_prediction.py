"""A prediction of one image by a model package, as a script in a fresh process: `trial_prediction FOLDER`."""

import io
import sys
from pathlib import Path

from PIL import Image

from tasks.model_package.classifier import ImageClassifier


def main() -> None:
    """Load the package, and print the label of a gray image.

    Raises:
        ValueError: The prediction is an error, or its probability is not within 0-1.
    """
    image = io.BytesIO()
    Image.new("RGB", (64, 64), (128, 128, 128)).save(image, "PNG")
    (found,) = ImageClassifier.load(Path(sys.argv[1])).predict([image.getvalue()])
    if found.error is not None or found.probability is None or not 0 <= found.probability <= 1:
        raise ValueError(f"the prediction of a gray image is {found}")
    print(found.label)


if __name__ == "__main__":
    main()
