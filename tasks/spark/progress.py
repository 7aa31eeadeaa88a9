"""Progress of a step on Spark: tasks that end on any executor are counted on the driver."""

from pyspark import Accumulator, AccumulatorParam, SparkContext, TaskContext

from tasks.progress.count import advance

EndedParts = tuple[tuple[str, str, int], ...]
"""Step, partition and number of images of each task that ended."""

IMAGES_PER_TASK = 5_000
"""Images per task of a large step: a task of several minutes would show no progress for as long."""

MAX_TASKS_PER_CORE = 8
"""Upper bound, as each task has a fixed cost."""


class EndedTasks(AccumulatorParam[EndedParts]):
    """Accumulator that adds each ended task to the driver's counts.

    Spark merges a task's updates once, when it succeeds. A task that ran twice counts once (`advance`).
    """

    def zero(self, value: EndedParts) -> EndedParts:
        """Return the initial value."""
        return ()

    def addInPlace(self, value1: EndedParts, value2: EndedParts) -> EndedParts:  # noqa: N802  # Spark's name
        """Collect in a task; on the driver, which has no task context, count and return the empty value."""
        if TaskContext.get() is not None:
            return value1 + value2
        for step, part, images in value1 + value2:
            advance(step, part, images)
        return ()


def count_ended_tasks(spark: SparkContext) -> Accumulator[EndedParts]:
    """Return the accumulator to which `tasks.spark.worker_log.WorkerCount` adds each task of a step."""
    return spark.accumulator((), EndedTasks())


def num_tasks(rows: int, cores: int, least: int) -> int:
    """Return the number of tasks of a step: one per IMAGES_PER_TASK images, within bounds.

    Args:
        rows: Number of images of the step.
        cores: Number of cores of the session.
        least: Minimum number of tasks.
    """
    return max(least, min(-(-rows // IMAGES_PER_TASK), MAX_TASKS_PER_CORE * cores))
