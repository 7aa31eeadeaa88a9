"""Parameters of a training run, of its repetition, and of the sanity checks before a long one."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from tasks.config.cache import IMAGE_SIZE, CacheRun
from tasks.config.frozen import AsBefore, FrozenConfig, hashed_settings
from tasks.config.run import TABLES, SparkRun
from tasks.config.values import MAX_THREADS, YEAR_SECONDS, Epochs, KeepDays, RunId, Seconds, VariableName
from tasks.environment import CALLERS_NAMES
from tasks.errors import WrongInput


class AugmentationConfig(FrozenConfig):
    """Random augmentation of the training images on the training device; other splits are not augmented."""

    flip: bool = Field(False, description="Flip half of the images horizontally")
    resized_crop: float = Field(
        1.0, gt=0.0, le=1.0, description="Minimum area of a random resized crop as a fraction of the image; 1: no crop"
    )
    rand_augment: int = Field(
        0, ge=0, le=10, description="Number of RandAugment operations (colour and geometry) per image; 0: none"
    )
    mixup: float = Field(0.0, ge=0.0, le=10.0, description="Alpha of MixUp, which blends images and labels; 0: none")
    cutmix: float = Field(
        0.0, ge=0.0, le=10.0, description="Alpha of CutMix, which pastes a patch of another image; 0: none"
    )

    @property
    def is_on(self) -> bool:
        """True if any augmentation is enabled."""
        return self != AugmentationConfig()


class FineTunePhase(FrozenConfig):
    """A fine-tuning phase after the training of the head, starting from the best weights so far."""

    unfreeze_from: str = Field(
        min_length=1,
        description="First layer to unfreeze, by torchvision's name (features.14, layer4), with all layers after it; "
        "all: every layer",
    )
    learning_rate: float = Field(
        1e-4, gt=0.0, le=10.0, description="Learning rate in this phase, for reference_batch_size images per step"
    )
    max_epochs: Epochs = Field(5, description="Maximum number of epochs in this phase")


class TrainConfig(FrozenConfig):
    """One training run, in a single process or on several ranks."""

    model: str = Field("mobilenet_v2", min_length=1, description="Any classifier of torchvision.models.get_model")
    weights: str = Field(
        "DEFAULT",
        min_length=1,
        # One line in the form: image_size is on its first screen.
        description="Initial weights: none, DEFAULT (torchvision's pretrained, downloaded), or the path of a state "
        "dict or checkpoint",
    )
    freeze_backbone: bool = Field(
        True, description="Freeze the backbone and train only the new head; requires pretrained weights"
    )
    optimizer: Literal["adam", "adamw", "sgd"] = Field("adam", description="Optimizer; sgd uses momentum 0.9")
    learning_rate: float = Field(
        1e-3, gt=0.0, le=10.0, description="Learning rate for reference_batch_size images per step over all ranks"
    )
    schedule: Literal["cosine", "constant", "one_cycle", "plateau"] = Field(
        "cosine",
        description="Learning rate schedule. `cosine`: decay to 0 at max_epochs. `constant`: no decay. `one_cycle`: "
        "rise, then decay. `plateau`: division by 10 after plateau_epochs without improvement",
    )
    plateau_epochs: Epochs = Field(
        2,
        description="Epochs without improvement after which the learning rate is reduced (schedule plateau)",
    )
    weight_decay: float = Field(0.0, ge=0.0, le=1.0, description="Weight decay, decoupled with adamw")
    label_smoothing: float = Field(
        0.0, ge=0.0, lt=1.0, description="Fraction of the target probability that is spread evenly over all classes"
    )
    max_gradient_norm: float | None = Field(
        None,
        gt=0.0,
        le=1e9,
        description="Maximum norm to which the gradients of a step are clipped; empty: no clipping",
    )
    class_weights: Literal["none", "balanced"] = Field(
        "none", description="Class weights in the training loss; balanced: inversely proportional to class frequency"
    )
    ema_decay: float | None = Field(
        None,
        gt=0.0,
        lt=1.0,
        description="Decay per step of a moving average of the weights, such as 0.999, which is validated and logged "
        "in place of the weights; the first steps decay faster. Empty: no average",
    )
    augmentation: AugmentationConfig = AugmentationConfig()
    fine_tune: list[FineTunePhase] = Field(
        default_factory=list,
        max_length=100,
        description="Phases after the training of the head, each with more trainable layers",
    )
    batch_size: Annotated[int, Field(ge=1, le=65536)] | Literal["auto"] = Field(
        32,
        description="Images per batch on each rank; lowered where the split `train` has fewer. auto: the largest batch "
        "that fits into the device's memory",
    )
    accumulate_steps: int = Field(
        1,
        ge=1,
        le=4096,
        description="Batches of each rank whose gradients are accumulated to one step, for a larger step than fits "
        "into memory; batch norm still sees single batches",
    )
    scale_learning_rate: Literal["auto", "none", "linear", "sqrt"] = Field(
        "auto",
        description="Scaling of the learning rate with the images per step, over all ranks and relative to "
        "reference_batch_size. The rule auto is sqrt (their square root) for adam and adamw, and linear for sgd; none "
        "leaves the rate",
    )
    reference_batch_size: int = Field(
        32,
        ge=1,
        le=2**28,
        description="Images per step over all ranks for which learning_rate is meant, and which leave it unscaled",
    )
    warmup_epochs: float | None = Field(
        None,
        ge=0.0,
        le=10_000.0,
        description="Epochs of linear warm-up at the start of each phase, which patience does not count. It begins "
        "with the unscaled learning rate if that is scaled up, else with a hundredth. Empty: 5 epochs if the learning "
        "rate is scaled up, but at most a quarter of the phase; else 0",
    )
    max_epochs: Epochs = Field(20, description="Maximum number of epochs, without those of fine_tune")
    max_seconds: Seconds | None = Field(
        None,
        description="Time budget of all epochs, including those before a restart, in seconds; empty: no limit. The "
        "step that exceeds it is the last (with several ranks, one within about a second), and its epoch is validated. "
        "Training and validation count. Startup, feature extraction, checkpoints, the final evaluation and work that a "
        "killed process lost do not",
    )
    patience: Epochs = Field(
        3,
        description="Epochs without improvement, after the warm-up, after which training stops early; the best weights "
        "are restored",
    )
    min_delta: float = Field(
        0.0, ge=0.0, le=1e9, description="Minimum change of the monitored metric that counts as an improvement"
    )
    monitor: Literal["val_accuracy", "val_loss", "val_macro_f1", "val_top5_accuracy"] = Field(
        "val_accuracy",
        description="Metric monitored by early stopping; val_macro_f1 gives all classes the same weight, whatever "
        "their size",
    )
    seed: int = Field(1, ge=1, lt=2**32, description="Seed of weight initialisation, shuffling and dropout")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Training device; auto: a GPU if available")
    precision: Literal["auto", "fp32", "tf32", "bf16"] = Field(
        "auto",
        description="Numeric precision of the computation. `auto`: bf16 if the device supports it, on a CPU only for "
        "images of 128 pixels or more. `tf32`: fp32 with TensorFloat-32 products, on GPUs",
    )
    compile: bool = Field(
        False,
        description="Compile the network with torch.compile: minutes at startup, faster steps; requires a C++ compiler",
    )
    feature_cache: bool = Field(
        True, description="Run a frozen backbone once per image and train the head on the cached features"
    )
    checkpoint_seconds: Seconds = Field(
        300,
        description="Time between two checkpoints, in seconds; one is also written after every epoch",
    )
    keep_checkpoints: int = Field(2, ge=1, le=100, description="Number of checkpoints to keep during training")
    keep_checkpoint_days: KeepDays = Field(
        30,
        description="Days after which the checkpoints of other, abandoned training runs are removed at the start of "
        "this one; 0: never",
    )
    timeout_seconds: Seconds = Field(
        86_400,
        description="Timeout of the training run, in seconds; when it is run again, it resumes",
    )
    stall_timeout_seconds: Annotated[int, AsBefore(600)] = Field(
        600,
        ge=10,
        le=YEAR_SECONDS,
        description="Time without progress of a training process after which it is ended, with all ranks, in seconds. "
        "Longer than any training step; work of unknown length, such as compiling or logging the model, may take an "
        "hour",
    )
    num_threads: int = Field(
        0,
        ge=0,
        le=MAX_THREADS,
        description="Compute threads per rank; 0: divide the available cores among the ranks and concurrent trials",
    )
    trace_steps: int = Field(
        0,
        ge=0,
        le=1000,
        description="Steps of rank 0 in each phase that torch's profiler records, after the first 3, as the artifact "
        "trace/phase-00.json.gz; it is slower meanwhile. 0: none",
    )
    environment: list[VariableName] = Field(
        default_factory=list,
        max_length=100,
        description="Names of environment variables that ranks get in addition to those of torch, storage and "
        "tracking; their values are those of the process that starts the ranks",
    )

    @field_validator("environment")
    @classmethod
    def _check_environment(cls, names: list[str]) -> list[str]:
        if theirs := sorted(CALLERS_NAMES & set(names)):
            raise WrongInput(
                f"{theirs[0]} points at other work with MLflow, and ranks never get it", way_out="remove the name"
            )
        return names

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.freeze_backbone and self.weights == "none":
            raise WrongInput(
                "freeze_backbone is true with weights 'none', which would train a head on random features",
                setting="freeze_backbone",
                way_out="set freeze_backbone to false, or weights to DEFAULT or a path",
            )
        if self.fine_tune and not self.freeze_backbone:
            raise WrongInput(
                f"fine_tune has {len(self.fine_tune)} phases, but freeze_backbone is false and every layer is trained "
                "from the start",
                setting="fine_tune",
                way_out="leave fine_tune out, or set freeze_backbone to true",
            )
        if self.schedule == "plateau" and self.plateau_epochs >= self.patience:
            raise WrongInput(
                f"plateau_epochs is {self.plateau_epochs} and patience {self.patience}, so training stops before the "
                "learning rate is reduced",
                setting="plateau_epochs",
                way_out="make patience larger than plateau_epochs",
            )
        if self.schedule == "one_cycle" and self.warmup_epochs:
            raise WrongInput(
                f"schedule is 'one_cycle', which has a warm-up of its own, and warmup_epochs is {self.warmup_epochs:g}",
                setting="schedule",
                way_out="leave warmup_epochs out, or choose another schedule",
            )
        return self

    @property
    def total_epochs(self) -> int:
        """Maximum number of epochs over all phases."""
        return self.max_epochs + sum(phase.max_epochs for phase in self.fine_tune)

    @property
    def makes_features(self) -> bool:
        """True if the first phase trains on cached features; those of augmented images change every epoch."""
        return self.freeze_backbone and self.feature_cache and not self.augmentation.is_on

    @property
    def trains_head_only(self) -> bool:
        """True if every phase trains only the head, on cached features."""
        return self.makes_features and not self.fine_tune

    def fitting_batch(self, num_ranks: int, rows: int) -> int | Literal["auto"]:
        """Return `batch_size`, lowered so that a step of all ranks takes at most `rows` images, those of `train`."""
        if self.batch_size == "auto":
            return "auto"
        return max(1, min(self.batch_size, rows // (num_ranks * self.accumulate_steps)))

    def decisive(self) -> dict[str, Any]:
        """Return the settings that determine the result, with the values of `neutral`.

        Checkpoints kept, timeouts, environment and trace do not.
        """
        kept = {"checkpoint_seconds", "keep_checkpoints", "keep_checkpoint_days"}
        limits = {"timeout_seconds", "stall_timeout_seconds"}
        names = type(self).model_fields.keys() - kept - limits - {"environment", "trace_steps"}
        return hashed_settings(self, names) | self.neutral

    @property
    def neutral(self) -> dict[str, Any]:
        """Settings that do not affect the result of this run, with the value that stands for all of them.

        A head on cached features is never compiled, and its weights are the same for any number of threads. Those of
        whole networks differ in rounding, which training amplifies; on a GPU no thread of the CPU adds up gradients.
        """
        threads = {"num_threads": 0} if self.trains_head_only or self.device == "cuda" else {}
        return threads | ({"compile": False} if self.trains_head_only else {})

    @property
    def continues(self) -> bool:
        """True if more epochs continue a run: the learning rate of a step does not depend on the number of epochs."""
        return self.schedule in {"constant", "plateau"}


NETWORK = {name: ("train", name) for name in ("model", "weights", "freeze_backbone")}
DEVICE_AND_EPOCHS = {name: ("train", name) for name in ("device", "max_epochs")}


class TrainRun(CacheRun):
    """Parameters of the flow `train`."""

    first_screen = NETWORK | IMAGE_SIZE | DEVICE_AND_EPOCHS | TABLES

    train: TrainConfig = TrainConfig()


class RepeatRun(SparkRun):
    """Parameters of the flow `repeat`."""

    run_id: RunId | None = Field(None, description="MLflow run to repeat; empty: the newest finished training run")


class OverfitConfig(FrozenConfig):
    """Overfitting of a single batch, which any model that is able to learn achieves."""

    max_steps: int = Field(200, ge=1, le=100_000, description="Maximum number of training steps on the batch")
    target_loss_ratio: float = Field(
        0.1, gt=0.0, lt=1.0, description="Fraction of the initial loss below which the loss must fall"
    )


class GradientConfig(FrozenConfig):
    """Inspection of the gradients of the first batches."""

    num_batches: int = Field(
        2,
        ge=1,
        le=1000,
        description="Number of batches to train on; in the first, a layer initialised with zeros passes no gradient on",
    )


class OverfitRun(TrainRun):
    """Parameters of the flow `overfit-batch`."""

    overfit: OverfitConfig = OverfitConfig()


class GradientRun(TrainRun):
    """Parameters of the flow `check-gradients`."""

    gradients: GradientConfig = GradientConfig()
