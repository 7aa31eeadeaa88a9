"""What a person fills in on models: training, ranks, promotion, batch inference."""

from typing import Literal, Self

from pydantic import Field, model_validator

from tasks.config.storage import Settings
from tasks.credentials import Url


class TrainConfig(Settings):
    """One training run, on one process or on many ranks."""

    model: str = Field("mobilenet_v2", min_length=1, description="Any classifier torchvision.models.get_model knows")
    weights: str = Field(
        "DEFAULT",
        min_length=1,
        description="none, DEFAULT (torchvision's pretrained weights, downloaded), or the path of a state dict",
    )
    freeze_backbone: bool = Field(True, description="Train the new head only; needs pretrained weights")
    optimizer: Literal["adam", "adamw", "sgd"] = Field("adam", description="sgd runs with momentum 0.9")
    learning_rate: float = Field(1e-3, gt=0.0, le=10.0, description="Learning rate of one rank")
    schedule: Literal["cosine", "constant", "one_cycle"] = Field(
        "cosine",
        description="Learning rate over the epochs: falls to 0 at max_epochs along a cosine, stays, or rises and falls",
    )
    weight_decay: float = Field(0.0, ge=0.0, le=1.0, description="Weight decay (AdamW: decoupled)")
    label_smoothing: float = Field(
        0.0, ge=0.0, lt=1.0, description="Share of a target's probability that all classes get alike"
    )
    max_gradient_norm: float | None = Field(
        None, gt=0.0, description="Norm above which the gradients of a step are scaled down to it; empty: no bound"
    )
    batch_size: int = Field(32, ge=1, le=65536, description="Pictures a step on each rank")
    max_epochs: int = Field(20, ge=1, le=10_000, description="Upper bound of epochs")
    patience: int = Field(
        3, ge=1, description="Stop after this many epochs without improvement; the best weights are restored"
    )
    min_delta: float = Field(0.0, ge=0.0, description="The least change that counts as improvement")
    monitor: Literal["val_accuracy", "val_loss", "val_macro_f1", "val_top5_accuracy"] = Field(
        "val_accuracy",
        description="Metric that early stopping watches; val_macro_f1 counts each class alike, however small",
    )
    seed: int = Field(1, ge=1, description="Seed of weights, shuffling and dropout")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto takes a GPU where there is one")
    timeout_seconds: int = Field(
        86_400, ge=1, description="The training is ended after this many seconds; run again, it goes on where it was"
    )
    num_threads: int = Field(
        0, ge=0, description="Compute threads a rank; 0 shares the machine's cores among its ranks"
    )

    @model_validator(mode="after")
    def _freeze_only_what_was_trained(self) -> Self:
        if self.freeze_backbone and self.weights == "none":
            raise ValueError(
                "freeze_backbone is true with weights 'none', which would train a head on random features: "
                "set freeze_backbone to false, or weights to DEFAULT or a path"
            )
        return self


class DistributedConfig(Settings):
    """The same training under Horovod, submitted to a GPU work pool."""

    num_ranks: int = Field(2, ge=1, le=4096, description="Number of ranks (processes)")
    scale_learning_rate: Literal["linear", "sqrt", "none"] = Field(
        "linear", description="How the learning rate grows with the number of ranks"
    )
    warmup_epochs: float = Field(
        1.0, ge=0.0, description="Epochs over which the learning rate rises to its scaled value"
    )
    where: Literal["auto", "work_pool", "in_place"] = Field(
        "auto",
        description="auto submits to the work pool where a Prefect server is configured, and else trains in place",
    )
    work_pool: str = Field("gpu", min_length=1, description="Work pool whose worker runs the ranks")
    deployment: str = Field(
        "train-distributed/train-distributed",
        pattern=r"^[^/]+/[^/]+$",
        description="Deployment to submit, flow/deployment",
    )
    submit_timeout_seconds: int = Field(
        300, ge=1, description="How long the submitted run may wait while no worker polls the pool, in seconds"
    )
    run_timeout_seconds: int = Field(86_400, ge=1, description="How long the submitted run may take, in seconds")
    stall_timeout_seconds: int = Field(
        600, ge=61, description="Ranks are ended when one waits this long for another (Horovod warns after 60)"
    )


class PromoteConfig(Settings):
    """Which run becomes the champion."""

    model_name: str = Field("lakevision", pattern=r"^[^/:]+$", description="Name of the registered model")
    min_test_accuracy: float = Field(
        0.0, ge=0.0, le=1.0, description="A run below this accuracy on the split `test` is not promoted"
    )


class PredictConfig(Settings):
    """Batch inference with the champion."""

    table: Url | None = Field(
        None, description="Delta table with columns sha256 and content; empty: the table `images`"
    )
    predictions: Url | None = Field(None, description="Delta table to write; empty: `predictions` among the tables")
    alias: str = Field(
        "champion", pattern=r"^[a-zA-Z_-]+$", description="Alias of the registered model version to predict with"
    )
    batch_size: int = Field(64, ge=1, le=4096, description="Pictures a forward pass")
