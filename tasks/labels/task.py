"""The search for suspected labels as a Prefect task, and its artifact."""

from prefect.artifacts import create_markdown_artifact

from tasks.config.storage import SparkConfig
from tasks.config.train import TrainConfig
from tasks.orchestration.stage import stage
from tasks.refs import CacheRef, LabelErrorReport
from tasks.storage import Storage
from tasks.text.markup import markdown_code, markdown_table, markdown_text


@stage("label-errors", timeout_in="train")
def suspect(train: TrainConfig, cache: CacheRef, storage: Storage, spark_config: SparkConfig) -> LabelErrorReport:
    """Find labels that the features of the other images speak against, and publish the most suspicious ones."""
    from tasks.labels.suspects import suspect_labels  # Here: it loads torch.

    report = suspect_labels(train, cache, storage, spark_config)
    create_markdown_artifact(
        label_errors_markdown(report), key="label-errors", description="Labels that are suspected to be wrong"
    )
    return report


def label_errors_markdown(report: LabelErrorReport) -> str:
    """Return suspected labels as Markdown: how many, between which classes, and the most suspicious images."""
    parts = [f"{markdown_text(report.line)}."]
    if report.pairs:
        rows = [
            [markdown_text(label), markdown_text(suggested), str(number)] for label, suggested, number in report.pairs
        ]
        parts += ["## Most frequent", markdown_table(["label", "suggested", "images"], rows)]
    if report.shown:
        rows = [
            [
                f"![]({image.thumbnail})" if image.thumbnail else "",
                markdown_text(image.label),
                markdown_text(image.suggested),
                f"{image.score:.2f}",
                markdown_code(image.path or image.sha256),
            ]
            for image in report.shown
        ]
        parts += ["## Most suspicious", markdown_table(["", "label", "suggested", "score", "file"], rows)]
    return "\n\n".join(parts)
