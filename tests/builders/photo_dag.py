"""The DAG on real photos with pretrained weights, called as a Python function in a process of its own."""

import shutil
from pathlib import Path

from tasks.summary.summary import PipelineSummary
from tests.builders.processes import plain_environment, run_python

CODE = """
import sys
from flows.pipeline import pipeline
from tasks.config.pipeline import PipelineConfig

pipeline(PipelineConfig.model_validate({
    "train_on": sys.argv[3],
    "etl": {"source": sys.argv[1]},
    "train": {"model": "mobilenet_v2", "weights": sys.argv[2], "freeze_backbone": True},
}))
"""


def half_of_each_class(photos: Path, folder: Path) -> Path:
    """Copy every second photo of each class into a folder, and return it."""
    for path in sorted(photos.iterdir()):
        (folder / path.name).mkdir(parents=True)
        for file in sorted(path.glob("*.jpg"))[::2]:
            shutil.copy(file, folder / path.name)
    return folder


def run_photo_dag(photos: Path, test_data: Path, folder: Path, train_on: str) -> tuple[PipelineSummary, str]:
    """Run the DAG with defaults: 224 pixels and a frozen mobilenet_v2; return its summary and its output."""
    words = (str(photos), str(test_data / "weights" / "mobilenet_v2.pth"), train_on)
    environment = plain_environment(LAKEVISION_HOME=str(folder / "home"), PREFECT_HOME=str(folder / "prefect"))
    completed = run_python("-c", CODE, *words, environment=environment, timeout=1700)
    assert completed.returncode == 0, completed.stdout[-4000:] + completed.stderr[-4000:]
    summary = PipelineSummary.model_validate_json((folder / "home" / "summary.json").read_text())
    return summary, completed.stdout + completed.stderr
