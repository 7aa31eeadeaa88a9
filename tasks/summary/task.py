"""The summary as a Prefect task."""

import logging

from prefect.artifacts import create_markdown_artifact

from tasks.orchestration.task import stage
from tasks.printable import printable
from tasks.refs import CacheRef, EtlReport, ModelRef, PredictReport, RunRef
from tasks.storage import Storage
from tasks.summary.summary import PipelineSummary, make_summary, summary_lines, write_summary
from tasks.train.markup import markdown_fence

logger = logging.getLogger("lakevision.summary")


@stage("summary", timeout_seconds=600)
def summarize(
    storage: Storage,
    etl: EtlReport,
    cache: CacheRef,
    single: RunRef,
    distributed: RunRef,
    champion: ModelRef,
    predictions: PredictReport,
    seconds: dict[str, float],
    skipped: dict[str, bool],
) -> PipelineSummary:
    """Write summary.json and a Markdown artifact."""
    summary = make_summary(storage, etl, cache, single, distributed, champion, predictions, seconds, skipped)
    path = write_summary(storage, summary)
    lines = summary_lines(summary)
    create_markdown_artifact(markdown_fence("\n".join(map(printable, lines))), key="summary", description=str(path))
    form = "\n%s" * len(lines)  # a line break of our own: one within a line is escaped
    logger.info(f"summary of the run{form}", *lines)
    return summary
