"""The summary of a run of the DAG: JSON, text lines and Markdown."""

import json
from pathlib import Path

import pytest

from tasks.refs import Verdict
from tasks.storage import Storage
from tasks.summary import SUMMARY_FILE
from tasks.summary.summary import (
    PipelineSummary,
    TrainingSummary,
    summary_lines,
    summary_markdown,
    write_summary,
)


@pytest.fixture
def summary() -> PipelineSummary:
    """Return the summary of a run without new images."""
    return PipelineSummary(
        images=90,
        quarantined=3,
        duplicates=2,
        delta_version=5,
        cache_rows={"train": 70, "val": 10, "test": 10},
        single=TrainingSummary(run_id="a", val_accuracy=0.9, test_accuracy=0.8),
        distributed=TrainingSummary(run_id="b", val_accuracy=0.95, test_accuracy=0.85),
        test_accuracy=0.85,
        model="lakevision",
        version=4,
        decision="lakevision version 4 stays the champion: it is not better",
        predictions=90,
        prediction_errors=0,
        predict_images_per_second=123.4,
        seconds={"etl": 1.25, "train": 60.0},
        skipped={"etl": True, "train": False},
    )


def storage_at(home: Path) -> Storage:
    """Return a storage with only the home set."""
    return Storage(home=str(home), tables="", cache="", artifacts="", tracking="")


def test_summary_is_written_atomically(tmp_path: Path, summary: PipelineSummary) -> None:
    """The home is created, a second run replaces the file, and no partial file remains."""
    write_summary(storage_at(tmp_path / "home"), summary)
    path = write_summary(storage_at(tmp_path / "home"), summary.model_copy(update={"version": 5}))

    assert path == tmp_path / "home" / SUMMARY_FILE
    assert json.loads(path.read_text())["version"] == 5
    assert [file.name for file in path.parent.iterdir()] == [SUMMARY_FILE]


def test_names_in_the_file_are_stable(tmp_path: Path, summary: PipelineSummary) -> None:
    """The names that programs read from summary.json do not change."""
    content = json.loads(write_summary(storage_at(tmp_path), summary).read_text())

    assert {"images", "quarantined", "delta_version", "cache_rows", "test_accuracy", "predictions"} <= content.keys()
    assert content["distributed"] == {"run_id": "b", "val_accuracy": 0.95, "test_accuracy": 0.85}
    assert PipelineSummary.model_validate(content) == summary


def test_lines_have_counts_accuracies_rate_and_times(summary: PipelineSummary) -> None:
    """The text has counts, accuracies, the rate, the time of each stage, and the skipped stages."""
    text = "\n".join(summary_lines(summary))

    assert "90 ingested, 3 quarantined, 2 duplicates" in text
    assert "train 70, val 10, test 10 rows" in text
    assert "0.9000 (one process), 0.9500 (distributed)" in text
    assert "lakevision version 4, test accuracy 0.8500" in text
    assert "gate          lakevision version 4 stays the champion: it is not better" in text
    assert "123 images/s" in text
    assert "etl 1.2 s (skipped), train 60.0 s" in text


def test_artifact_has_rows_for_facts_and_stages_and_links_to_the_results(summary: PipelineSummary) -> None:
    """Facts and stages are table rows, runs and model are links, and Markdown in a model's name is escaped."""
    runs = {"a": "http://mlflow/a", "b": "http://mlflow/b"}
    named = summary.model_copy(update={"model": "cats & [dogs](http://evil)"})
    text = summary_markdown(named, "http://mlflow/champion", runs, Path("/home/summary.json"))

    assert "| images | 90 ingested, 3 quarantined, 2 duplicates |" in text
    assert "| etl | 1.2 s | skipped |" in text
    assert "| train | 60.0 s |  |" in text
    assert "- Distributed training: [MLflow run](http://mlflow/b)" in text
    assert "version 4](http://mlflow/champion)" in text
    assert "](http://evil)" not in text.replace("\\]", "")
    assert "/home/summary.json" in text


def test_only_the_training_that_ran_is_shown(summary: PipelineSummary) -> None:
    """A DAG that trains in one process has neither accuracy nor link of distributed training."""
    alone = summary.model_copy(update={"distributed": None})
    text = summary_markdown(alone, None, {"a": "http://mlflow/a"}, Path("/home/summary.json"))

    assert "training      val accuracy 0.9000 (one process)" in summary_lines(alone)
    assert "- Training in one process: [MLflow run](http://mlflow/a)" in text
    assert "istributed" not in text
    assert PipelineSummary.model_validate_json(alone.model_dump_json()) == alone


def test_run_without_new_images_has_no_rate(summary: PipelineSummary) -> None:
    """A run without predictions has "nothing new to predict" instead of a rate of zero images per second."""
    nothing = summary.model_copy(update={"predictions": 0, "predict_images_per_second": None})

    assert any("nothing new to predict" in line for line in summary_lines(nothing))


def test_page_begins_with_the_champion_its_interval_and_the_next_commands(summary: PipelineSummary) -> None:
    """Then come the figures, the mistakes first, and after them facts and stages."""
    known = summary.model_copy(update={"test_interval": (0.78, 0.9), "next": {"serve": "mlflow models serve"}})
    text = summary_markdown(
        known, None, {"a": None, "b": None}, Path("/s.json"), "## Which images it gets wrong\n\n![]()"
    )

    assert text.splitlines()[0] == "# lakevision version 4, test accuracy 0.8500 (95 % interval 0.7800 to 0.9000)"
    headings = [line for line in text.splitlines() if line.startswith("## ")]
    assert headings == ["## Next commands", "## Which images it gets wrong", "## Results", "## Stages"]
    assert "# serve\nmlflow models serve\n" in text


def test_verdict_is_a_line_before_the_training(summary: PipelineSummary) -> None:
    """The sentence is in the text and on the page, its figures are in the file, and a run without it has no line."""
    verdict = Verdict(line="expected test accuracy 0.80 to 0.90", accuracy=0.86, interval=(0.8, 0.9))
    judged = summary.model_copy(update={"verdict": verdict})
    lines = summary_lines(judged)

    assert lines[3] == "verdict       expected test accuracy 0.80 to 0.90"
    assert lines[4].startswith("training")
    assert "| verdict | expected test accuracy 0.80 to 0.90 |" in summary_markdown(
        judged, None, {"a": None, "b": None}, Path("/s")
    )
    assert json.loads(judged.model_dump_json())["verdict"]["interval"] == [0.8, 0.9]
    assert PipelineSummary.model_validate_json(judged.model_dump_json()) == judged
    assert not any("verdict" in line for line in summary_lines(summary))


def test_summary_says_why_the_champion_has_its_weights(summary: PipelineSummary) -> None:
    """A run of one phase has no such line."""
    chosen = summary.model_copy(update={"why": "'all layers' is the best"})

    assert "why           'all layers' is the best" in summary_lines(chosen)
    assert not any(line.startswith("why") for line in summary_lines(summary))


def test_summary_of_an_earlier_release_is_read(summary: PipelineSummary) -> None:
    """Its file has neither an interval nor commands."""
    earlier = summary.model_dump(exclude={"test_interval", "next", "verdict"})
    assert PipelineSummary.model_validate(earlier) == summary
