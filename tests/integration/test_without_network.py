"""A model package in a process without network."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tasks.model.training_network import build_classifier
from tasks.model_package.classifier import ImageClassifier, save_classifier
from tests.builders.image_bytes import encoded, noise
from tests.builders.processes import ROOT, bare_environment

PROGRAM = """
import socket
import sys
from pathlib import Path

try:
    socket.create_connection(("127.0.0.1", 9), timeout=5)
except OSError as error:
    print(error.strerror)
from tasks.model_package.classifier import ImageClassifier

print(ImageClassifier.load(Path(sys.argv[1])).predict([Path(sys.argv[2]).read_bytes()], top_k=2)[0].top_labels)
"""


def test_model_package_needs_no_network(tmp_path: Path) -> None:
    """A package is loaded and predicts in a network namespace in which even the loopback interface is down."""
    isolated = ["unshare", "--net", "--map-root-user"]
    try:
        permitted = subprocess.run([*isolated, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        permitted = False
    if not permitted:
        pytest.skip("this system does not permit a network namespace (unshare --net)")
    torch.manual_seed(1)
    network = build_classifier("squeezenet1_1", "none", 3, freeze_backbone=False)
    save_classifier(tmp_path / "package", "squeezenet1_1", network.state_dict(), ("ant", "bee", "cat"), 64)
    image = tmp_path / "image.png"
    image.write_bytes(encoded(noise(40, 60)))
    command = [*isolated, sys.executable, "-c", PROGRAM, str(tmp_path / "package"), str(image)]

    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=bare_environment(tmp_path, str(ROOT)),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    expected = ImageClassifier.load(tmp_path / "package").predict([image.read_bytes()], top_k=2)[0]
    assert done.stdout.splitlines() == ["Network is unreachable", str(expected.top_labels)]
