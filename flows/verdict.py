"""The verdict flow: what training on a folder of images will reach, in minutes, before anything is trained in full."""

from flows.command_line import run_from_command_line
from flows.decorator import dag_flow
from tasks.cache.task import materialize
from tasks.checks.task import check_trainable
from tasks.config.pipeline import VerdictRun
from tasks.etl.task import ingest
from tasks.launch.task import settle_weights
from tasks.orchestration.stage import run_stage
from tasks.refs import Verdict
from tasks.storage import resolve_storage
from tasks.verdict.task import give_verdict


@dag_flow("verdict")
def verdict(config: VerdictRun = VerdictRun()) -> Verdict:
    """Ingest a folder of images, and estimate what the training of a head will reach."""
    storage = resolve_storage(config.storage)
    start = settle_weights(config.train, storage, config.spark)
    run_stage(check_trainable, start, config.cache)
    etl = run_stage(ingest, config.etl, storage, config.spark)
    cache = run_stage(materialize, config.cache, etl.images, storage, config.spark)
    return run_stage(give_verdict, start, cache, storage)


if __name__ == "__main__":
    run_from_command_line(verdict, VerdictRun)
