"""The service and its live test as Prefect tasks, and their artifacts."""

import logging
import time

from prefect.artifacts import create_link_artifact, create_markdown_artifact

from tasks.config.promotion import PromoteConfig
from tasks.config.serving import LiveTestConfig, ServeRun
from tasks.config.storage import SparkConfig
from tasks.orchestration.stage import stage
from tasks.refs import LiveReport, ServeReport
from tasks.serve.live_test import compare_live
from tasks.serve.registry import check_servable
from tasks.serve.service import check_settings, running_service
from tasks.storage import Storage
from tasks.text.markup import markdown_code, markdown_table, markdown_text

logger = logging.getLogger("lakevision.serve")


@stage("serve")
def serve_model(config: ServeRun, storage: Storage) -> ServeReport:
    """Serve the champion over HTTP until the run is cancelled, or its time is over."""
    check_settings(config, storage)
    model = check_servable(config, storage)
    # By its name: what the tables are is known here, and where only Spark reads them, a session is open.
    named = config.model_copy(update={"promote": config.promote.model_copy(update={"model_name": model.name})})
    with running_service(named, storage) as service:
        began = time.monotonic()
        about = f"The page of {model.name}: drop an image, and see its class and what speaks for it"
        create_link_artifact(link=f"{service.url}/", link_text=service.url, key="service", description=about)
        logger.info("%s version %d is served: %s/", model.name, model.version, service.url)
        service.wait(config.serve.run_seconds)
        return ServeReport(url=service.url, model=model, seconds=time.monotonic() - began)


@stage("compare-live", timeout_seconds=3600)
def compare_answers(
    live: LiveTestConfig, promote: PromoteConfig, storage: Storage, spark_config: SparkConfig
) -> LiveReport:
    """Compare the challenger with the champion by their answers in service."""
    report = compare_live(live, promote, storage, spark_config)
    create_markdown_artifact(
        live_markdown(report), key="live-test", description="Whether the challenger is better in service, and by what"
    )
    return report


def live_markdown(report: LiveReport) -> str:
    """Return the report of a live test: the result, live accuracies, and the images that need a label."""
    parts = [f"{markdown_text(report.line)}."]
    if report.accuracies:
        rows = [
            [
                str(one.version),
                f"{one.accuracy:.4f}",
                f"{one.interval[0]:.4f} to {one.interval[1]:.4f}",
                str(one.images),
            ]
            for one in report.accuracies
        ]
        parts += ["## Accuracy on images with a label", markdown_table(["version", "accuracy", "95 %", "images"], rows)]
        parts += [
            "Labels of mistakes alone, or of images on which the versions differ, make it too low: label a random "
            "sample to know it."
        ]
    if report.asked:
        rows = [
            [
                f"![]({one.thumbnail})" if one.thumbnail else "",
                markdown_text(one.champion_label),
                markdown_text(one.challenger_label),
                markdown_code(one.request_id),
                str(one.image),
                markdown_code(one.sha256),
            ]
            for one in report.asked
        ]
        head = ["", "champion", "challenger", "request", "image", "sha256"]
        parts += ["## Labels needed, in this order", markdown_table(head, rows)]
    return "\n\n".join(parts)
