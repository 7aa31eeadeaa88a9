"""Peers of serve.py: `serve_peers.py litserve FOLDER PORT`, or `serve_peers.py bare FOLDER IMAGE SECONDS`.

LitServe runs around the model package, with its batches across requests. The other, `bare`, is the forward pass of
decoded images in batches of 32 with all cores, and prints its images per second.
"""

import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tasks.model_package.classifier import ImageClassifier

BATCH = 32
WAIT_SECONDS = 0.005


def serve_with_litserve(folder: str, port: str) -> None:
    """Serve until a signal is received."""
    import litserve

    class Api(litserve.LitAPI):
        """The model package as LitServe has it: decode, batch, predict, encode."""

        def setup(self, _device: str) -> None:
            """Load the model package."""
            self.classifier = ImageClassifier.load(Path(folder))

        async def decode_request(self, request: Any) -> bytes:
            """Return the image of a form."""
            content: bytes = await request["image"].read()
            return content

        def batch(self, inputs: list[bytes]) -> list[bytes]:
            """Return the images as they are."""
            return inputs

        def predict(self, images: list[bytes], **_given: Any) -> list[Any]:
            """Return the predictions of a batch."""
            return list(self.classifier.predict(images))

        def unbatch(self, output: list[Any]) -> list[Any]:
            """Return the predictions as they are."""
            return output

        def encode_response(self, found: Any, **_given: Any) -> dict[str, Any]:
            """Return a prediction as JSON values."""
            return {"label": found.label, "top_labels": found.top_labels, "top_probabilities": found.top_probabilities}

    api = Api(max_batch_size=BATCH, batch_timeout=WAIT_SECONDS)
    litserve.LitServer(api, accelerator="cpu").run(host="127.0.0.1", port=int(port), generate_client_file=False)


def bare(folder: str, image: str, seconds: str) -> None:
    """Print the images per second of the forward pass."""
    import numpy as np
    import torch

    from tasks.model_package.decode import decode_pixels

    classifier = ImageClassifier.load(Path(folder))
    pixels = decode_pixels(Path(image).read_bytes(), classifier.image_size)
    batch = torch.from_numpy(np.stack([pixels] * BATCH))
    for _warm_up in range(3):
        classifier.logits(batch)
    began, num = time.perf_counter(), 0
    while time.perf_counter() - began < float(seconds):
        classifier.logits(batch)
        num += BATCH
    print(num / (time.perf_counter() - began))


if __name__ == "__main__":
    {"litserve": serve_with_litserve, "bare": bare}[sys.argv[1]](*sys.argv[2:])
