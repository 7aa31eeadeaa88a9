"""The cache stage as a Prefect task."""

import hashlib
from typing import Any

from prefect.artifacts import create_table_artifact
from prefect.context import TaskRunContext

from tasks.cache.left_out import MAX_NAMED
from tasks.cache.manifest import find_cache, open_cache
from tasks.cache.materialize import materialize_cache
from tasks.config.cache import CacheConfig
from tasks.config.storage import SparkConfig
from tasks.orchestration.stage import skipped, stage
from tasks.refs import CacheRef, TableRef
from tasks.storage import Storage
from tasks.text.markup import in_cells


def _key(_context: TaskRunContext, parameters: dict[str, Any]) -> str | None:
    found = find_cache(parameters["storage"].cache, parameters["table"], parameters["cache_config"])
    # Includes URL and table: the same data cached under another home, or for another table, is another result.
    return None if found is None else f"cache-{hashlib.sha256(found.model_dump_json().encode()).hexdigest()}"


@stage("cache", timeout_in="cache_config", cache_key=_key)
def materialize(cache_config: CacheConfig, table: TableRef, storage: Storage, spark_config: SparkConfig) -> CacheRef:
    """Build the training cache of one Delta version unless it exists."""
    ref, built = materialize_cache(cache_config, table, storage, spark_config)
    if built and (bad := open_cache(ref).quarantined):
        about = (
            f"{len(bad)} images of `{table.path}` version {table.version} cannot be decoded: the cache lacks them, and "
            "its `manifest.json` has all of them"
        )
        shown = [in_cells(image.model_dump()) for image in bad[:MAX_NAMED]]
        create_table_artifact(shown, key="left-out", description=about)
    return ref if built else skipped(ref, f"{ref.url} exists already")
