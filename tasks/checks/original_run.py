"""Settings and data of a finished training run, read from MLflow to repeat it."""

from typing import Any

from pydantic import ValidationError

from tasks.config.cache import CacheConfig
from tasks.config.distributed import DistributedConfig
from tasks.config.frozen import RECORDED, added_settings
from tasks.config.recipe import FineTuningPlan
from tasks.config.train import TrainConfig
from tasks.errors import WrongInput, explain
from tasks.refs import Ref
from tasks.storage import Storage
from tasks.tracking.trained import LoggedTraining, logged_training, newest_training


class OriginalRun(Ref):
    """A finished training run as it was logged: settings, data version and provenance."""

    run_id: str
    train: TrainConfig
    distributed: DistributedConfig | None
    cache_config: CacheConfig
    cache_digest: str
    table: str
    version: int
    content_digest: str
    weights_digest: str
    device: str
    processor: str | None = None
    """Name of the CPU or GPU; None if the run did not log it."""
    precision: str
    num_threads: int | None = None
    """Number of threads per rank; None if the run did not log it."""
    batch_sizes: dict[str, str]
    """Batch size by phase, if it was chosen automatically."""
    versions: dict[str, str]
    code_version: str | None
    resumed_with_changes: str | None = None
    """Changes of the provenance when the run was resumed; None if there were none."""
    plan: FineTuningPlan | None = None
    """Plan of the recipe's fine-tuning, which a repetition takes over."""
    metrics: dict[str, float]
    new_settings: list[str]
    """Settings of this version that the run's version did not have, and that have their defaults."""


def read_training(run_id: str | None, storage: Storage) -> OriginalRun:
    """Read settings and data version of a run, by default the newest run that is not a repetition.

    Raises:
        WrongInput: No such finished run exists, or its settings are invalid in this version.
    """
    logged = logged_training(storage, run_id or newest_training(storage).run_id)
    try:
        return _parse(logged)
    except KeyError as error:
        raise WrongInput(
            f"run_id is '{logged.run_id}', whose config.json has no {error}",
            setting="run_id",
            way_out="it was logged by an older version, which did not record everything; give a newer run",
        ) from None
    except ValidationError as error:
        raise WrongInput(
            f"run_id is '{logged.run_id}', whose settings are invalid in this version ({explain(error)})",
            setting="run_id",
            way_out=f"check out the code it was trained with, {logged.code_version or 'which the run did not record'}",
        ) from None


def _parse(logged: LoggedTraining) -> OriginalRun:
    config: dict[str, Any] = logged.config
    data, train = config["data"], config["train"]
    # A repetition removes no old checkpoints or caches.
    return OriginalRun(
        **{name: value for name, value in vars(logged).items() if name not in {"config", "plan"}},
        plan=None if logged.plan is None else FineTuningPlan.model_validate_json(logged.plan),
        train=TrainConfig.model_validate(train | {"keep_checkpoint_days": 0}, context=RECORDED),
        distributed=None
        if config["distributed"] is None
        else DistributedConfig.model_validate(config["distributed"], context=RECORDED),
        cache_config=CacheConfig.model_validate(config["cache"]["settings"] | {"keep_days": 0}, context=RECORDED),
        cache_digest=config["cache"]["digest"],
        table=data["table"],
        version=data["version"],
        content_digest=data["content_digest"],
        weights_digest=config["weights_digest"],
        device=config["device"],
        processor=config.get("processor"),
        precision=config["precision"],
        num_threads=config.get("num_threads"),
        new_settings=sorted(TrainConfig.model_fields.keys() - train.keys() - added_settings(TrainConfig).keys()),
    )
