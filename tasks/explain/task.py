"""Explanations as a Prefect task, and their artifact."""

from prefect.artifacts import create_markdown_artifact

from tasks.config.promotion import PromoteConfig
from tasks.config.serving import ExplainConfig
from tasks.config.storage import SparkConfig
from tasks.orchestration.stage import stage
from tasks.refs import ExplainReport
from tasks.storage import Storage
from tasks.text.markup import markdown_code, markdown_text


@stage("explain", timeout_seconds=86_400)
def explain_named(
    explain: ExplainConfig, promote: PromoteConfig, storage: Storage, spark_config: SparkConfig
) -> ExplainReport:
    """Write the heat map of each image to a folder."""
    from tasks.explain.images import explain_images  # torch: seconds

    report = explain_images(explain, promote, storage, spark_config)
    about = f"Heat maps by {report.model.name} version {report.model.version}; bright places speak for the class"
    create_markdown_artifact(explanations_markdown(report), key="explanations", description=about)
    return report


def explanations_markdown(report: ExplainReport) -> str:
    """Return the explained images with their classes as Markdown."""
    parts = [f"All of them are in {markdown_code(report.folder)}, in full size."]
    for image in report.images:
        parts += [
            f"![]({image.thumbnail})",
            f"**{markdown_text(image.label)}** {image.probability:.4f}: {markdown_text(image.path)}",
        ]
    return "\n\n".join(parts)
