"""The sanity checks as Prefect tasks, which publish their measurements as artifacts.

Modules that load torch are imported inside the functions: registering deployments does not wait for torch.
"""

from prefect.artifacts import create_table_artifact

from tasks.config.train import GradientConfig, OverfitConfig, TrainConfig
from tasks.orchestration.task import stage
from tasks.refs import CacheRef, GradientReport, OverfitReport
from tasks.text.markup import in_cells


@stage("overfit-batch", timeout_seconds=3600)
def overfit_one_batch(train: TrainConfig, cache: CacheRef, overfit: OverfitConfig) -> OverfitReport:
    """Overfit one batch, publish its loss curve, and raise an error if the loss does not reach the target."""
    from tasks.sanity.checks import check_overfitted, overfit_batch

    report = overfit_batch(train, cache, overfit)
    rows = [{"step": step, "loss": loss} for step, loss in enumerate(report.losses)]
    create_table_artifact(table=rows, key="overfit-batch", description=f"Loss of one batch of {report.num_images}")
    check_overfitted(report, train, overfit)
    return report


@stage("check-gradients", timeout_seconds=3600)
def check_all_gradients(train: TrainConfig, cache: CacheRef, gradients: GradientConfig) -> GradientReport:
    """Publish the gradient norms of all trained parameters, and raise an error if a gradient is missing."""
    from tasks.sanity.checks import check_gradients, measure_gradients

    report = measure_gradients(train, cache, gradients)
    rows = [in_cells(found.model_dump()) for found in report.parameters]
    create_table_artifact(table=rows, key="gradients", description=f"Gradients over {report.batches} batches")
    check_gradients(report)
    return report
