"""How far a step on Spark is: each task that ends is counted on the driver, wherever it ran."""

from pyspark import Accumulator, AccumulatorParam, SparkContext, TaskContext

from tasks.progress.count import advance

EndedParts = tuple[tuple[str, str, int], ...]
"""Step, partition and images of tasks that ended."""

IMAGES_PER_TASK = 5_000
"""Of a large step: a task that takes minutes shows no progress for as long."""

MOST_TASKS_PER_CORE = 8
"""Each task has a price: inference loads the model in it."""


class EndedTasks(AccumulatorParam[EndedParts]):
    """Tells the driver's counts of each task that ended.

    Spark hands over what a task added once, when it has ended well. One that ran twice counts once (`advance`).
    """

    def zero(self, value: EndedParts) -> EndedParts:
        """Return the value before anything was added."""
        return ()

    def addInPlace(self, value1: EndedParts, value2: EndedParts) -> EndedParts:  # noqa: N802  # Spark's name
        """Collect on an executor; count on the driver, which has no task, and keep nothing there."""
        if TaskContext.get() is not None:
            return value1 + value2
        for step, part, images in value1 + value2:
            advance(step, part, images)
        return ()


def count_ended_tasks(spark: SparkContext) -> Accumulator[EndedParts]:
    """Return what the functions of a step tell of their tasks (`tasks.spark.worker_log.WorkerCount`)."""
    return spark.accumulator((), EndedTasks())


def num_tasks(rows: int, cores: int, least: int) -> int:
    """Return into how many tasks a step of so many images is divided: one per IMAGES_PER_TASK, within bounds.

    Args:
        rows: Images of the step.
        cores: Of the session.
        least: Tasks of a small step.
    """
    return max(least, min(-(-rows // IMAGES_PER_TASK), MOST_TASKS_PER_CORE * cores))
