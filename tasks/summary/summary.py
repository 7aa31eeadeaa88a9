"""The summary of a run of the DAG: `summary.json`, log lines, and a Markdown artifact."""

import os
from collections.abc import Mapping
from pathlib import Path

from pydantic import Field

from tasks.cache.manifest import open_cache
from tasks.commands import next_commands
from tasks.config.etl import BUILTIN_DIGITS
from tasks.interval import wilson_interval
from tasks.refs import CacheRef, EtlReport, ModelRef, PredictReport, Ref, RunRef, Verdict
from tasks.report.page import commands_markdown
from tasks.storage import Storage
from tasks.summary import SUMMARY_FILE
from tasks.text.markup import markdown_code, markdown_link, markdown_table, markdown_text
from tasks.tracking.evaluated import evaluated_version
from tasks.tracking.models import PROMOTION_TAG, version_tags
from tasks.tracking.runs import WHY_TAG, run_metrics, run_params, run_tag


class TrainingSummary(Ref):
    """Results of one training run."""

    run_id: str
    val_accuracy: float
    test_accuracy: float


class PipelineSummary(Ref):
    """Results of a run of the DAG; the names are stable, since programs read them from summary.json."""

    images: int
    quarantined: int
    duplicates: int
    ignored: int = 0
    """Files of the source with neither the name nor the content of an image."""
    delta_version: int
    cache_rows: dict[str, int]
    verdict: Verdict | None = Field(None, repr=False)
    """What training was expected to reach, before it began; None for a run of an earlier release."""
    single: TrainingSummary | None
    """Training in one process; None if the DAG did not train so."""
    distributed: TrainingSummary | None
    """Training with ranks; None if the DAG did not train so."""
    test_accuracy: float
    test_interval: tuple[float, float] | None = None
    """95 % confidence interval of the champion's test accuracy; None if its number of test images is unknown."""
    model: str
    version: int
    why: str = ""
    """Why the champion has the weights of its phase of training; empty if there was one phase."""
    decision: str
    """The last decision of the promotion gate about the champion, as a sentence."""
    predictions: int
    prediction_errors: int
    predict_images_per_second: float | None
    """None if no new images were predicted."""
    seconds: dict[str, float]
    skipped: dict[str, bool]
    next: dict[str, str] = Field({}, repr=False)
    """Commands that a user may run next, by goal."""


def _training(storage: Storage, run: RunRef) -> TrainingSummary:
    metrics = run_metrics(storage, run)
    return TrainingSummary(
        run_id=run.run_id, val_accuracy=metrics["best_val_accuracy"], test_accuracy=metrics["test_accuracy"]
    )


def make_summary(
    storage: Storage,
    etl: EtlReport,
    cache: CacheRef,
    verdict: Verdict,
    single: RunRef | None,
    distributed: RunRef | None,
    champion: ModelRef,
    predictions: PredictReport,
    seconds: dict[str, float],
    skipped: dict[str, bool],
) -> PipelineSummary:
    """Collect the results of the stages."""
    tested = evaluated_version(storage, champion)  # its run may have been purged
    interval = wilson_interval(tested.accuracy * tested.images, tested.images) if tested.images else None
    return PipelineSummary(
        images=etl.stored,
        quarantined=etl.quarantined,
        duplicates=etl.duplicates,
        ignored=etl.ignored,
        delta_version=etl.images.version,
        cache_rows={split: part.rows for split, part in open_cache(cache).splits.items()},
        verdict=verdict,
        single=None if single is None else _training(storage, single),
        distributed=None if distributed is None else _training(storage, distributed),
        test_accuracy=tested.accuracy,
        test_interval=interval,
        model=champion.name,
        version=champion.version,
        why=run_tag(storage, RunRef(run_id=champion.run_id), WHY_TAG),
        decision=version_tags(storage, champion).get(PROMOTION_TAG, ""),
        predictions=predictions.predicted,
        prediction_errors=predictions.errors,
        predict_images_per_second=round(predictions.predicted / predictions.seconds, 1)
        if predictions.seconds
        else None,
        seconds=seconds,
        skipped=skipped,
        next=next_commands(storage, champion.name, _network(storage, champion, etl.images.source)),
    )


def _network(storage: Storage, champion: ModelRef, source: str) -> dict[str, str]:
    """Return the options of the champion's network; none if pretrained weights, the default, are the better start."""
    settings = run_params(storage, RunRef(run_id=champion.run_id))
    from_scratch = settings.get("train.weights", "none") == "none"
    if from_scratch and not source.startswith(BUILTIN_DIGITS):
        return {}
    names = {"model": "train.model", "weights": "train.weights", "recipe": "train.recipe"}
    names["image_size"] = "cache.image_size"
    return {
        name: settings[param].lower() if settings[param] in {"True", "False"} else settings[param]
        for name, param in names.items()
        if param in settings
    }


def write_summary(storage: Storage, summary: PipelineSummary) -> Path:
    """Write summary.json atomically; return its path."""
    home = Path(storage.home)
    home.mkdir(parents=True, exist_ok=True)
    partial = home / f".{SUMMARY_FILE}.partial"
    partial.write_text(summary.model_dump_json(indent=2) + "\n")
    os.replace(partial, home / SUMMARY_FILE)
    return home / SUMMARY_FILE


def summary_lines(summary: PipelineSummary) -> list[str]:
    """Return the summary as text, one line per fact."""
    return [f"{name:<13} {text}" for name, text in _facts(summary).items()]


def summary_markdown(
    summary: PipelineSummary, champion: str | None, runs: Mapping[str, str | None], file: Path, figures: str = ""
) -> str:
    """Return the summary as Markdown: the champion, the next commands, its figures, all facts, and links.

    Args:
        summary: Results of the run.
        champion: URL of the champion's page in MLflow; None if the tracking database has no UI.
        runs: URL of the page of each training run by MLflow run id; None as above.
        file: Path of summary.json.
        figures: The figures of the champion's training run, as Markdown.
    """
    stages = [
        [markdown_text(name), f"{seconds:.1f} s", "skipped" if summary.skipped[name] else ""]
        for name, seconds in summary.seconds.items()
    ]
    facts = [[name, markdown_text(text)] for name, text in _facts(summary).items() if name != "stages"]
    named = {"Training in one process": summary.single, "Distributed training": summary.distributed}
    links = [
        f"- {name}: {markdown_link('MLflow run', runs[training.run_id])}"
        for name, training in named.items()
        if training
    ]
    return "\n".join(
        [
            f"# {markdown_text(_facts(summary)['champion'])}",
            "",
            *([commands_markdown(summary.next), ""] if summary.next else []),
            *([figures, ""] if figures else []),
            "## Results",
            "",
            markdown_table(["item", "value"], facts),
            "",
            f"- Champion: {markdown_link(f'{markdown_text(summary.model)} version {summary.version}', champion)}",
            *links,
            f"- For programs: {markdown_code(file)}",
            "",
            "## Stages",
            "",
            markdown_table(["stage", "time", "note"], stages),
            "",
        ]
    )


def _facts(summary: PipelineSummary) -> dict[str, str]:
    rows = ", ".join(f"{split} {count}" for split, count in summary.cache_rows.items())
    rate = summary.predict_images_per_second
    stages = ", ".join(
        f"{name} {seconds:.1f} s{' (skipped)' if summary.skipped[name] else ''}"
        for name, seconds in summary.seconds.items()
    )
    interval = ""
    if summary.test_interval is not None:
        interval = " (95 % interval {:.4f} to {:.4f})".format(*summary.test_interval)
    others = f", {summary.ignored} other files ignored" if summary.ignored else ""
    trained = {"one process": summary.single, "distributed": summary.distributed}
    accuracies = [f"{training.val_accuracy:.4f} ({name})" for name, training in trained.items() if training]
    return {
        "images": f"{summary.images} ingested, {summary.quarantined} quarantined, {summary.duplicates} duplicates"
        + others,
        "Delta": f"version {summary.delta_version}",
        "cache": f"{rows} rows",
        **({"verdict": summary.verdict.line} if summary.verdict else {}),
        "training": f"val accuracy {', '.join(accuracies)}",
        "champion": f"{summary.model} version {summary.version}, test accuracy {summary.test_accuracy:.4f}{interval}",
        **({"why": summary.why} if summary.why else {}),
        "gate": summary.decision or "unknown",
        "inference": "nothing new to predict" if rate is None else f"{rate:.0f} images/s",
        "stages": stages,
    }
