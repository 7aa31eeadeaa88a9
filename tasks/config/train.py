"""What a person fills in on a training."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from tasks.config.cache import IMAGE_SIZE, CacheRun
from tasks.config.form import Schema, must_be, unless_given, when
from tasks.config.frozen import FrozenConfig
from tasks.config.run import SparkRun
from tasks.config.values import MAX_THREADS, YEAR_SECONDS, KeepDays, RunId


class AugmentationConfig(FrozenConfig):
    """Random changes of the training images, made on the training device; the other splits are never changed."""

    flip: bool = Field(False, description="Mirror half of the images, left to right")
    resized_crop: float = Field(
        1.0, gt=0.0, le=1.0, description="Least share of an image's area that is cut out and scaled up; 1: no crops"
    )
    rand_augment: int = Field(
        0, ge=0, le=10, description="Random changes of colour and shape an image (RandAugment); 0: none"
    )
    mixup: float = Field(0.0, ge=0.0, le=10.0, description="Alpha of MixUp: images and labels are blended; 0: none")
    cutmix: float = Field(
        0.0, ge=0.0, le=10.0, description="Alpha of CutMix: a patch comes from another image; 0: none"
    )

    @property
    def is_on(self) -> bool:
        """Whether anything is changed."""
        return self != AugmentationConfig()


class FineTunePhase(FrozenConfig):
    """A stage after the frozen backbone's: it begins with the best weights so far."""

    unfreeze_from: str = Field(
        min_length=1,
        description="First layer that learns, by torchvision's name (features.14, layer4), with all behind it; "
        "all: every layer",
    )
    learning_rate: float = Field(1e-4, gt=0.0, le=10.0, description="Learning rate of one rank in this stage")
    max_epochs: int = Field(5, ge=1, le=10_000, description="Upper bound of this stage's epochs")


class TrainConfig(FrozenConfig):
    """One training run, on one process or on many ranks."""

    rules: ClassVar[tuple[Schema, ...]] = (
        # Where it is left out here, it may stand beside the group.
        when("weights", "none", {"properties": {"freeze_backbone": {"const": False}}}),
        when("freeze_backbone", False, {"properties": {"fine_tune": {"maxItems": 0}}}),
        when("schedule", "one_cycle", {"properties": {"warmup_epochs": {"enum": [0, None]}}}),
    )

    model: str = Field("mobilenet_v2", min_length=1, description="Any classifier torchvision.models.get_model knows")
    weights: str = Field(
        "DEFAULT",
        min_length=1,
        description="none, DEFAULT (torchvision's pretrained weights, downloaded), or the path of a state dict",
    )
    freeze_backbone: bool = Field(True, description="Train the new head only; needs pretrained weights")
    optimizer: Literal["adam", "adamw", "sgd"] = Field("adam", description="sgd runs with momentum 0.9")
    learning_rate: float = Field(1e-3, gt=0.0, le=10.0, description="Learning rate of one rank")
    schedule: Literal["cosine", "constant", "one_cycle", "plateau"] = Field(
        "cosine",
        description="Learning rate over the epochs: falls to 0 at max_epochs along a cosine, stays, rises and falls, "
        "or falls to a tenth after plateau_epochs without improvement",
    )
    plateau_epochs: int = Field(
        2,
        ge=1,
        le=10_000,
        description="Epochs without improvement after which the learning rate falls (schedule plateau)",
    )
    weight_decay: float = Field(0.0, ge=0.0, le=1.0, description="Weight decay (AdamW: decoupled)")
    label_smoothing: float = Field(
        0.0, ge=0.0, lt=1.0, description="Share of a target's probability that all classes get alike"
    )
    max_gradient_norm: float | None = Field(
        None,
        gt=0.0,
        le=1e9,
        description="Norm above which the gradients of a step are scaled down to it; empty: no bound",
    )
    class_weights: Literal["none", "balanced"] = Field(
        "none", description="balanced: a class counts in the training loss by how rare it is"
    )
    augmentation: AugmentationConfig = AugmentationConfig()
    fine_tune: list[FineTunePhase] = Field(
        default_factory=list,
        max_length=100,
        description="Stages after the frozen backbone's, each with more layers that learn",
    )
    batch_size: Annotated[int, Field(ge=1, le=65536)] | Literal["auto"] = Field(
        32, description="Images a step on each rank; auto: the largest that fits the device's memory"
    )
    scale_learning_rate: Literal["none", "linear", "sqrt"] = Field(
        "none",
        description="How the learning rate follows the images a step on a rank: 32 have train.learning_rate, more "
        "have a higher one, fewer a lower one",
    )
    warmup_epochs: float | None = Field(
        None,
        ge=0.0,
        le=10_000.0,
        description="Epochs over which the learning rate of each stage rises at first: to one that is scaled up from "
        "that of 32 images, else from a hundredth; empty: where the batch scales it up 5, at most a quarter of the "
        "stage, else 0",
    )
    max_epochs: int = Field(20, ge=1, le=10_000, description="Upper bound of epochs")
    max_seconds: int | None = Field(
        None,
        ge=1,
        le=YEAR_SECONDS,
        description="Budget of all epochs over all starts, in seconds: the step that uses it up is the last (on many "
        "ranks one within about a second), its epoch is validated. Training and validation count; starting, making "
        "features, checkpoints, the evaluation at the end and what a killed process did after its last checkpoint do "
        "not; empty: no bound",
    )
    patience: int = Field(
        3, ge=1, le=10_000, description="Stop after this many epochs without improvement; the best weights are restored"
    )
    min_delta: float = Field(0.0, ge=0.0, le=1e9, description="The least change that counts as improvement")
    monitor: Literal["val_accuracy", "val_loss", "val_macro_f1", "val_top5_accuracy"] = Field(
        "val_accuracy",
        description="Metric that early stopping watches; val_macro_f1 counts each class alike, however small",
    )
    seed: int = Field(1, ge=1, lt=2**32, description="Seed of weights, shuffling and dropout")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto takes a GPU where there is one")
    precision: Literal["auto", "fp32", "tf32", "bf16"] = Field(
        "auto",
        description="Number format of the network's sums; auto: bf16 where the device computes in it, on a CPU for "
        "images of 128 pixels or more; tf32: fp32 with shorter factors, on GPUs",
    )
    compile: bool = Field(
        False, description="Compile the network (torch.compile): minutes at the start, faster steps; needs a compiler"
    )
    feature_cache: bool = Field(
        True, description="Run a frozen backbone once an image and train the head on what it gave"
    )
    checkpoint_seconds: int = Field(
        300,
        ge=1,
        le=YEAR_SECONDS,
        description="A checkpoint is written after this many seconds, beside that of every epoch",
    )
    keep_checkpoints: int = Field(2, ge=1, le=100, description="Checkpoints that are kept while it trains")
    keep_checkpoint_days: KeepDays = Field(
        30,
        description="Checkpoints of other training runs, abandoned for so many days, are removed when this one "
        "begins; 0: none is removed",
    )
    timeout_seconds: int = Field(
        86_400,
        ge=1,
        le=YEAR_SECONDS,
        description="The training is ended after this many seconds; run again, it goes on where it was",
    )
    num_threads: int = Field(
        0, ge=0, le=MAX_THREADS, description="Compute threads a rank; 0 shares the machine's cores among its ranks"
    )

    @model_validator(mode="after")
    def _freeze_only_what_was_trained(self) -> Self:
        if self.freeze_backbone and self.weights == "none":
            raise ValueError(
                "freeze_backbone is true with weights 'none', which would train a head on random features: "
                "set freeze_backbone to false, or weights to DEFAULT or a path"
            )
        return self

    @model_validator(mode="after")
    def _fine_tune_what_is_frozen(self) -> Self:
        if self.fine_tune and not self.freeze_backbone:
            raise ValueError(
                f"fine_tune has {len(self.fine_tune)} stages, but freeze_backbone is false and every layer learns from "
                "the start: leave fine_tune out, or set freeze_backbone to true"
            )
        return self

    @model_validator(mode="after")
    def _stop_before_the_plateau_is_no_use(self) -> Self:
        if self.schedule == "plateau" and self.plateau_epochs >= self.patience:
            raise ValueError(
                f"plateau_epochs is {self.plateau_epochs} and patience {self.patience}, so training stops before the "
                "learning rate falls: make patience larger than plateau_epochs"
            )
        return self

    @model_validator(mode="after")
    def _warm_up_once(self) -> Self:
        if self.schedule == "one_cycle" and self.warmup_epochs:
            raise ValueError(
                f"schedule is 'one_cycle', whose rise is a warm-up of its own, and warmup_epochs is "
                f"{self.warmup_epochs:g}: leave warmup_epochs out, or choose another schedule"
            )
        return self

    @property
    def total_epochs(self) -> int:
        """Upper bound of the epochs of all stages."""
        return self.max_epochs + sum(stage.max_epochs for stage in self.fine_tune)

    @property
    def makes_features(self) -> bool:
        """Whether the first stage may learn from features made once: those of augmented images change each epoch."""
        return self.freeze_backbone and self.feature_cache and not self.augmentation.is_on

    @property
    def is_head_alone(self) -> bool:
        """Whether the head learns from features that are made once, in every stage."""
        return self.makes_features and not self.fine_tune

    def decisive(self) -> dict[str, Any]:
        """Return the settings that decide the result: all but when it is saved and how long it may take."""
        kept = {"checkpoint_seconds", "keep_checkpoints", "keep_checkpoint_days"}
        return self.model_dump(exclude=kept | {"timeout_seconds"})


NETWORK = {
    "model": ("train", "model"),
    "weights": ("train", "weights"),
    "freeze_backbone": ("train", "freeze_backbone"),
}


DEVICE_AND_EPOCHS = {"device": ("train", "device"), "max_epochs": ("train", "max_epochs")}


NETWORK_RULES: tuple[Schema, ...] = (
    unless_given("train", "freeze_backbone", when("weights", "none", must_be("freeze_backbone", False))),
    when("freeze_backbone", False, {"properties": {"train": {"properties": {"fine_tune": {"maxItems": 0}}}}}),
)
"""Those of TrainConfig between what is shown first and what lies in the group."""


class TrainRun(CacheRun):
    """Parameters of the flow `train`."""

    first = NETWORK | IMAGE_SIZE | DEVICE_AND_EPOCHS
    rules: ClassVar[tuple[Schema, ...]] = NETWORK_RULES

    train: TrainConfig = TrainConfig()


class RepeatRun(SparkRun):
    """Parameters of the flow `repeat`."""

    run_id: RunId | None = Field(None, description="MLflow run to repeat; empty: the newest finished training")
