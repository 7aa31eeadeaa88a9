"""The cache flow: decode one version of the Delta table `images` into pixels for training."""

from flows.command_line import run_from_command_line
from flows.decorator import dag_flow
from tasks.cache.task import materialize
from tasks.config.cache import CacheRun
from tasks.etl.task import choose_images
from tasks.orchestration.stage import run_stage
from tasks.refs import CacheRef
from tasks.storage import resolve_storage


@dag_flow("cache")
def cache(config: CacheRun = CacheRun()) -> CacheRef:
    """Build the training cache of a version of `images`, or reuse the existing one."""
    storage = resolve_storage(config.storage)
    images = run_stage(choose_images, config.table_version, storage, config.spark)
    return run_stage(materialize, config.cache, images, storage, config.spark)


if __name__ == "__main__":
    run_from_command_line(cache, CacheRun)
