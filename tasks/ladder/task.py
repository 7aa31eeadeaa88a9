"""The end of the scaling ladder as a Prefect task."""

import logging
from collections.abc import Sequence

from prefect.artifacts import create_markdown_artifact

from tasks.ladder.steps import Ladder, StepResult, advise
from tasks.orchestration.stage import stage

logger = logging.getLogger("lakevision.ladder")


@stage("compare-steps", timeout_seconds=600)
def compare_steps(steps: Sequence[StepResult]) -> Ladder:
    """Publish the table and the figure of the steps, and the one to take next."""
    from tasks.ladder.page import ladder_markdown, ladder_text  # Here: it draws with matplotlib.

    ladder = Ladder(steps=tuple(steps), advice=advise(steps))
    ladder = ladder.model_copy(update={"table": ladder_text(ladder)})
    create_markdown_artifact(ladder_markdown(ladder), key="scaling-ladder", description=ladder.advice)
    lines = ladder.table.splitlines()
    form = "\n%s" * len(lines)  # line breaks in the format: those within arguments are escaped
    logger.info(f"scaling ladder{form}", *lines)
    return ladder
