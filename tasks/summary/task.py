"""The summary as a Prefect task."""

import logging
from pathlib import Path

from prefect.artifacts import create_markdown_artifact

from tasks.environment import mlflow_page
from tasks.orchestration.stage import stage
from tasks.refs import CacheRef, EtlReport, ModelRef, PredictReport, RunRef, Verdict
from tasks.registry.decision import promotion_section
from tasks.report import MODEL_CARD_FILE
from tasks.report.page import card_with_figures, named_card, run_figures
from tasks.storage import Storage
from tasks.summary.summary import PipelineSummary, make_summary, summary_lines, summary_markdown, write_summary
from tasks.text.log_lines import log_lines
from tasks.tracking.models import model_location
from tasks.tracking.runs import read_artifact, run_location

logger = logging.getLogger("lakevision.summary")


@stage("summary", timeout_seconds=600)
def summarize(
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
    """Write summary.json, and publish the summary and the champion's model card with the run."""
    summary = make_summary(storage, etl, cache, verdict, single, distributed, champion, predictions, seconds, skipped)
    publish_summary(summary, storage, champion, write_summary(storage, summary))
    log_lines(logger, "summary of the run", summary_lines(summary))
    return summary


def publish_summary(summary: PipelineSummary, storage: Storage, champion: ModelRef, path: Path) -> None:
    """Publish the summary and the champion's model card as artifacts of the Prefect run."""
    pages = {
        training.run_id: mlflow_page(storage.tracking, run_location(storage, RunRef(run_id=training.run_id)))
        for training in (summary.single, summary.distributed)
        if training is not None
    }
    model = mlflow_page(storage.tracking, model_location(champion))
    run = RunRef(run_id=champion.run_id)
    card = read_artifact(storage, run, MODEL_CARD_FILE)
    figures = "" if card is None else run_figures(run, storage)
    create_markdown_artifact(
        summary_markdown(summary, model, pages, path, figures),
        key="summary",
        description="The result: accuracy, next commands, mistakes, and links",
    )
    if card is not None:
        text = f"{named_card(card.decode(), champion).rstrip()}\n\n{promotion_section(summary.decision)}\n"
        create_markdown_artifact(
            card_with_figures(text, figures, summary.next),
            key="champion-model-card",
            description=f"Model card of {champion.name} version {champion.version}",
        )
