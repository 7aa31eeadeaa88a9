"""The end of the scaling ladder as a Prefect task."""

import logging
from collections.abc import Sequence

from prefect.artifacts import create_markdown_artifact

from tasks.ladder.steps import Ladder, StepResult, advise
from tasks.orchestration.stage import stage
from tasks.text.log_lines import log_lines

logger = logging.getLogger("lakevision.ladder")


@stage("compare-steps", timeout_seconds=600)
def compare_steps(steps: Sequence[StepResult]) -> Ladder:
    """Publish the table and the figure of the steps, and the one to take next."""
    from tasks.ladder.page import ladder_markdown, ladder_text  # Here: it draws with matplotlib.

    ladder = Ladder(steps=tuple(steps), advice=advise(steps))
    ladder = ladder.model_copy(update={"table": ladder_text(ladder)})
    create_markdown_artifact(ladder_markdown(ladder), key="scaling-ladder", description=ladder.advice)
    log_lines(logger, "scaling ladder", ladder.table.splitlines())
    return ladder
