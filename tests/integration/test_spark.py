"""What a person reads of work that failed in Spark."""

import pytest
from pyspark import SparkContext
from pyspark.sql import functions as F

from tasks.config import SparkConfig
from tasks.spark import SparkFailed, spark_session


def fail(batches):
    """Raise in a Python worker."""
    for batch in batches:
        raise ValueError("no such picture")
        yield batch


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (lambda spark: spark.range(1).mapInArrow(fail, "id long").collect(), "ValueError: no such picture"),
        (lambda spark: spark.range(1).select("nothing").collect(), "nothing"),
        (lambda spark: spark.range(1).select(F.raise_error(F.lit("bad row"))).collect(), "bad row"),
    ],
    ids=["python worker", "analysis", "jvm"],
)
def test_a_failure_can_be_read_when_the_jvm_is_gone(spark, storage, monkeypatch, work, said):
    """Prefect formats an exception after the session has ended; pyspark's own would ask the JVM then."""
    with pytest.raises(SparkFailed) as failed, spark_session(SparkConfig(), storage) as session:
        work(session)
    monkeypatch.setattr(SparkContext, "_jvm", None)
    assert said in str(failed.value)
