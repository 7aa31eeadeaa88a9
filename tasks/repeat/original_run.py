"""A finished training as its MLflow run tells of it, to be done again."""

from typing import Any

from pydantic import ValidationError

from tasks import tracking
from tasks.config.cache import CacheConfig
from tasks.config.distributed import DistributedConfig
from tasks.config.train import TrainConfig
from tasks.errors import WrongInput, explain
from tasks.refs import Ref
from tasks.storage import Storage


class FirstTraining(Ref):
    """A finished training, as it was logged: what it takes to do it again."""

    run_id: str
    train: TrainConfig
    distributed: DistributedConfig | None
    cache: CacheConfig
    cache_digest: str
    table: str
    version: int
    content_digest: str
    weights_digest: str
    device: str
    processor: str | None = None
    """Name of the CPU or GPU that computed; None of runs that did not log it."""
    precision: str
    num_threads: int | None = None
    """That it computed with on each rank; None of runs that did not log it."""
    batch_sizes: dict[str, str]
    """By stage, where the training chose them itself."""
    versions: dict[str, str]
    code_version: str | None
    gone_on: str | None = None
    """What changed on the way, where it was interrupted and gone on with otherwise than it was begun."""
    metrics: dict[str, float]
    unknown_then: list[str]
    """Settings that a training has now and had not then; they have their defaults."""


def read_training(run_id: str | None, storage: Storage) -> FirstTraining:
    """Read what a run trained, and from what; without a run, the newest that is no repetition.

    Raises:
        WrongInput: There is no such finished training, or its settings are none any more.
    """
    logged = tracking.logged_training(storage, run_id or tracking.newest_training(storage).run_id)
    try:
        return _parse(logged)
    except KeyError as error:
        raise WrongInput(
            f"run_id is '{logged.run_id}', whose config.json has no {error}: it was logged by an older version, "
            "which logged too little; give a newer run"
        ) from None
    except ValidationError as error:
        raise WrongInput(
            f"run_id is '{logged.run_id}', whose settings are none of this version ({explain(error)}): "
            f"check out the code it was trained with, {logged.code_version or 'which it does not name'}"
        ) from None


def _parse(logged: tracking.LoggedTraining) -> FirstTraining:
    config: dict[str, Any] = logged.config
    data, train = config["data"], config["train"]
    # Nothing is removed for the sake of a repetition.
    return FirstTraining(
        run_id=logged.run_id,
        train=TrainConfig.model_validate(train | {"keep_checkpoint_days": 0}),
        distributed=None if config["distributed"] is None else DistributedConfig.model_validate(config["distributed"]),
        cache=CacheConfig.model_validate(config["cache"]["settings"] | {"keep_days": 0}),
        cache_digest=config["cache"]["digest"],
        table=data["table"],
        version=data["version"],
        content_digest=data["content_digest"],
        weights_digest=config["weights_digest"],
        device=config["device"],
        processor=config.get("processor"),
        precision=config["precision"],
        num_threads=config.get("num_threads"),
        batch_sizes=logged.batch_sizes,
        versions=logged.versions,
        code_version=logged.code_version,
        gone_on=logged.gone_on,
        metrics=logged.metrics,
        unknown_then=sorted(TrainConfig.model_fields.keys() - train.keys()),
    )
