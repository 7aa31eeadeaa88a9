"""The verdict as a Prefect task."""

import logging
from typing import Any

from prefect.artifacts import create_markdown_artifact
from prefect.context import TaskRunContext

from tasks.config.distributed import DistributedConfig
from tasks.config.submitted import SingleConfig
from tasks.config.train import TrainConfig
from tasks.model.pretrained import weights_digest
from tasks.orchestration.pools import where_to_run
from tasks.orchestration.stage import stage
from tasks.refs import CacheRef, Verdict
from tasks.storage import Storage
from tasks.train.spec import key_of

logger = logging.getLogger("lakevision.verdict")

DECISIVE = {"model", "seed", "device", "precision"}
"""Settings of a training run that decide about its verdict, beside its weights, and whether it makes features."""


def _key(_context: TaskRunContext, parameters: dict[str, Any]) -> str:
    train = parameters["train"]
    decisive = {
        "train": train.model_dump(mode="json", include=DECISIVE),
        "makes_features": train.makes_features,
        "weights": weights_digest(train.model, train.weights),
        "cache": parameters["cache"].model_dump(),
        "here": _trains_here(parameters["single"], parameters["distributed"]),
    }
    return f"verdict-{key_of(decisive)}"


def _trains_here(single: SingleConfig | None, distributed: DistributedConfig | None) -> bool:
    """Return whether a training run is on this machine; devices of others may give other features."""
    ranks = distributed if distributed is not None and distributed.launcher == "local" else None
    return any(where_to_run(place) == "in_place" for place in (single, ranks) if place is not None)


@stage("verdict", timeout_in="train", cache_key=_key)
def give_verdict(
    train: TrainConfig,
    cache: CacheRef,
    storage: Storage,
    single: SingleConfig | None = SingleConfig(),
    distributed: DistributedConfig | None = None,
) -> Verdict:
    """Estimate what the training of a head will reach, from the features that the training uses, and publish it."""
    if _trains_here(single, distributed):
        from tasks.verdict.judge import judge_cache  # Here: it loads torch.

        verdict, page = judge_cache(train, cache, storage)
        if page:
            create_markdown_artifact(page, key="verdict", description="What training will reach, before it starts")
    else:
        verdict = Verdict(line="none: training runs on other machines, which compute the features")
    logger.info("verdict: %s", verdict.line)
    return verdict
