"""Peer of serve.py: LitServe around the model package, with its batches across requests.

Run: `serve_litserve.py FOLDER PORT`. LitServe starts its workers anew, which import the class of this module.
"""

import sys
from pathlib import Path
from typing import Any

import litserve
from fastapi import Request

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tasks.model_package.classifier import ImageClassifier

BATCH = 32
WAIT_SECONDS = 0.005


class Api(litserve.LitAPI):
    """The model package as LitServe has it: decode, batch, predict, encode."""

    def __init__(self, folder: Path) -> None:
        super().__init__(max_batch_size=BATCH, batch_timeout=WAIT_SECONDS)
        self._folder = folder

    def setup(self, _device: str) -> None:
        """Load the model package."""
        self._classifier = ImageClassifier.load(self._folder)

    def decode_request(self, request: Request) -> bytes:
        """Return the image of a form."""
        content: bytes = request["image"].file.read()  # type: ignore[index]  # LitServe gives the form
        return content

    def batch(self, inputs: list[bytes]) -> list[bytes]:
        """Return the images as they are."""
        return inputs

    def predict(self, images: list[bytes], **_given: Any) -> list[Any]:
        """Return the predictions of a batch."""
        return list(self._classifier.predict(images))

    def unbatch(self, output: list[Any]) -> list[Any]:
        """Return the predictions as they are."""
        return output

    def encode_response(self, found: Any, **_given: Any) -> dict[str, Any]:
        """Return a prediction as JSON values."""
        return {"label": found.label, "top_labels": found.top_labels, "top_probabilities": found.top_probabilities}


if __name__ == "__main__":
    server = litserve.LitServer(Api(Path(sys.argv[1])), accelerator="cpu")
    server.run(host="127.0.0.1", port=int(sys.argv[2]), generate_client_file=False)
