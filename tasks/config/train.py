"""Parameters of a training run."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from tasks.config.augmentation import AugmentationConfig
from tasks.config.cache import IMAGE_SIZE, CacheRun
from tasks.config.frozen import AsBefore, FrozenConfig, hashed_settings
from tasks.config.run import TABLES
from tasks.config.values import MAX_THREADS, YEAR_SECONDS, Epochs, KeepDays, Seconds, VariableName
from tasks.errors import WrongInput


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


Monitor = Literal["val_accuracy", "val_loss", "val_calibrated_loss", "val_macro_f1", "val_top5_accuracy"]
"""A metric that early stopping can monitor."""

AUTO_SECONDS = 600
"""Time budget of the recipe auto, in seconds, where none is given: a short break at work."""
DEFAULTS: dict[str, Any] = {
    "freeze_backbone": True,
    "optimizer": "adam",
    "learning_rate": 1e-3,
    "schedule": "cosine",
    "weight_decay": 0.0,
    "label_smoothing": 0.0,
    "max_epochs": 20,
    "monitor": "val_accuracy",
}
"""Values of settings that neither the user nor the recipe (`tasks.config.recipe`) gives: those of release 0.1.0."""

RECIPE_VERSION = 1
"""Version of what recipes choose, which is part of the keys of training runs."""


class TrainConfig(FrozenConfig):
    """One training run, in a single process or on several ranks."""

    model: str = Field(
        "mobilenet_v2", min_length=1, description="Any classifier of torchvision.models.get_model, or timm:NAME"
    )
    weights: str = Field(
        "DEFAULT",
        min_length=1,
        # One line in the form: image_size is on its first screen.
        description="Initial weights: none, DEFAULT (pretrained, downloaded), champion, a run's id, or the path of a "
        "state dict",
    )
    recipe: Annotated[Literal["auto", "head", "finetune", "scratch", "given"], AsBefore("given")] = Field(
        "auto",
        description="Trained layers, and the settings for them. With head, the new head alone. With finetune, then all "
        "layers. With auto, these for as long as max_seconds allows, or scratch with weights none. With scratch, all "
        "layers at once. With given, as freeze_backbone and fine_tune say, with the defaults of release 0.1.0",
    )
    freeze_backbone: bool | None = Field(
        None,
        description="true: train only the new head, which requires pretrained weights. false: train all layers from "
        "the start. Empty: as the recipe says",
    )
    optimizer: Literal["auto", "adam", "adamw", "sgd"] = Field(
        "auto", description="Optimizer; sgd uses momentum 0.9. auto: that of the recipe"
    )
    learning_rate: float | None = Field(
        None,
        gt=0.0,
        le=10.0,
        description="Learning rate for reference_batch_size images per step over all ranks, without the phases of "
        "fine-tuning. Empty: that of the recipe",
    )
    schedule: Literal["auto", "cosine", "constant", "one_cycle", "plateau"] = Field(
        "auto",
        description="Learning rate schedule. `cosine`: decay to 0 at max_epochs. `constant`: no decay. `one_cycle`: "
        "rise, then decay. `plateau`: division by 10 after plateau_epochs without improvement. auto: cosine",
    )
    layer_decay: Annotated[float | None, AsBefore(None)] = Field(
        None,
        gt=0.0,
        le=1.0,
        description="Learning rate of the first layer as a fraction of that of the head, with layers between in "
        "geometric steps. Empty: that of the recipe",
    )
    plateau_epochs: Epochs = Field(
        2, description="Epochs without improvement after which the learning rate is reduced (schedule plateau)"
    )
    weight_decay: float | None = Field(
        None,
        ge=0.0,
        le=10.0,
        description="Weight decay, decoupled with adamw. Empty: that of the recipe, which spares norms and biases; for "
        "a head on cached features, the one of several that is best on the split `val`",
    )
    label_smoothing: float | None = Field(
        None,
        ge=0.0,
        lt=1.0,
        description="Fraction of the target probability that is spread evenly over all classes. Empty: that of the "
        "recipe",
    )
    dropout: Annotated[float | None, AsBefore(None)] = Field(
        None,
        ge=0.0,
        lt=1.0,
        description="Fraction of the head's inputs that are dropped in training, in place of the network's own "
        "dropout there. Empty: the network's own",
    )
    max_gradient_norm: float | None = Field(
        None, gt=0.0, le=1e9, description="Maximum norm to which a step's gradients are clipped; empty: no clipping"
    )
    class_weights: Literal["none", "balanced"] = Field(
        "none", description="Class weights in the training loss; balanced: inversely proportional to class frequency"
    )
    sampling: Annotated[Literal["natural", "balanced"], AsBefore("natural")] = Field(
        "natural",
        description="Images of an epoch. natural: each image once. balanced: as many images, each class equally often. "
        "Those of small classes are repeated, and some of large ones are left out until another epoch",
    )
    folds: Annotated[int, AsBefore(0)] = Field(
        0,
        ge=0,
        le=50,
        description="Parts of `train` and `val` for a cross-validation of the head on cached features, at least 3, "
        "each with another seed. The card and the promotion gate show the mean accuracy and its interval. 0: none",
    )
    ema_decay: float | None = Field(
        None,
        ge=0.0,
        lt=1.0,
        description="Decay per step of a moving average of the weights, such as 0.999, which is validated and logged "
        "in place of the weights; the first steps decay faster. 0: no average. Empty: that of the recipe",
    )
    augmentation: AugmentationConfig = AugmentationConfig()
    fine_tune: list[FineTunePhase] = Field(
        default_factory=list,
        max_length=100,
        description="Phases after the training of the head, each with more trainable layers, in place of the recipe's",
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
    max_epochs: Epochs | None = Field(
        None, description="Maximum number of epochs, without those of fine-tuning. Empty: that of the recipe"
    )
    max_seconds: Seconds | None = Field(
        None,
        description="Time budget in seconds. For fine-tuning by the recipe it is turned into epochs once, when the "
        f"head is trained; empty: {AUTO_SECONDS} with the recipe auto. Otherwise, of all epochs, with those before a "
        "restart; the step that exceeds it is the last, and its epoch is validated. Startup, feature extraction, "
        "checkpoints, the final evaluation and lost work do not count; empty: no limit",
    )
    patience: Epochs = Field(
        3,
        description="Epochs without improvement after which training stops early; the best weights are restored. "
        "Counted from the half of a schedule that falls, and not in fine-tuning by the recipe",
    )
    min_delta: float = Field(
        0.0, ge=0.0, le=1e9, description="Minimum change of the monitored metric that counts as an improvement"
    )
    monitor: Literal["auto"] | Monitor = Field(
        "auto",
        description="Metric monitored by early stopping; val_macro_f1 gives all classes the same weight, whatever "
        "their size. auto: val_calibrated_loss, the loss after calibration, which shows small differences on few "
        "images, too",
    )
    seed: int = Field(1, ge=1, lt=2**32, description="Seed of weight initialisation, shuffling and dropout")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Training device; auto: a GPU if available")
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = Field(
        "auto",
        description="Numeric precision of the computation. `auto`: bf16 if the device supports it, on a CPU only for "
        "images of 128 pixels or more. On GPUs without bf16 it is fp16, with a scaled loss. `tf32`: fp32 with "
        "TensorFloat-32 products, on GPUs",
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
    reader_threads: Annotated[int, AsBefore(2)] = Field(
        2, ge=1, le=64, description="Threads per rank that read the cache, and decode its images if they are JPEG files"
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
    histograms: bool = Field(
        False,
        description="Whether TensorBoard gets histograms of each layer's outputs and gradient norms, once per epoch",
    )
    environment: list[VariableName] = Field(
        default_factory=list,
        max_length=100,
        description="Names of environment variables that ranks get in addition to those of torch, storage and "
        "tracking; their values are those of the process that starts the ranks",
    )

    @model_validator(mode="after")
    def _check_recipe(self) -> Self:
        if self.recipe in {"finetune", "scratch"} and self.freeze_backbone:
            raise WrongInput(
                f"freeze_backbone is true, but the recipe is '{self.recipe}', which trains all layers",
                setting="freeze_backbone",
                way_out="leave freeze_backbone out, or set the recipe to head",
            )
        if self.weights == "none" and (self.freeze_backbone or self.recipe in {"head", "finetune"}):
            what, name, instead = f"the recipe is '{self.recipe}'", "recipe", "the recipe to scratch"
            if self.freeze_backbone:
                what, name, instead = "freeze_backbone is true", "freeze_backbone", "freeze_backbone to false"
            raise WrongInput(
                f"{what} with weights 'none', which would train a head on random features",
                setting=name,
                way_out=f"set {instead}, or weights to DEFAULT, champion, a run or a path",
            )
        if self.fine_tune and (self.trained == "all" or self.recipe == "head"):
            reason = "all layers are trained from the start" if self.trained == "all" else "the recipe is 'head'"
            raise WrongInput(
                f"fine_tune has {len(self.fine_tune)} phases, but {reason}",
                setting="fine_tune",
                way_out="leave fine_tune out, or set the recipe to finetune",
            )
        return self

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.sampling == "balanced" and self.class_weights == "balanced":
            raise WrongInput(
                "sampling and class_weights are both 'balanced', which would count small classes twice",
                setting="sampling",
                way_out="leave out one of them",
            )
        if self.folds and (self.folds < 3 or not self.makes_features):
            few = "fewer than the 3 of training, validation and test"
            raise WrongInput(
                f"folds is {self.folds}, {few if self.folds < 3 else 'and the training run has no cached features'}",
                setting="folds",
                way_out="give at least 3, or 0"
                if self.folds < 3
                else "leave it out, or set the recipe to head or auto",
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
    def trained(self) -> Literal["head", "head, then all", "all"]:
        """Layers that are trained: the new head, then all where the recipe or `fine_tune` says so, or all at once."""
        if self.freeze_backbone is False or self.recipe == "scratch":
            return "all"
        if self.freeze_backbone is None and self.weights == "none":
            return "all"
        by_recipe = self.recipe in {"auto", "finetune"} and self.freeze_backbone is None
        return "head, then all" if self.fine_tune or by_recipe else "head"

    @property
    def plans_fine_tuning(self) -> bool:
        """True if the recipe adds a phase of all layers, whose epochs are planned when the head is trained."""
        return self.trained == "head, then all" and not self.fine_tune

    @property
    def makes_features(self) -> bool:
        """True if the head is trained on cached features; those of augmented images change every epoch."""
        augments = self.augmentation.is_on and not self.plans_fine_tuning
        return self.trained != "all" and self.feature_cache and not augments

    @property
    def trains_head_only(self) -> bool:
        """True if every phase trains only the head, on cached features."""
        return self.makes_features and self.trained == "head"

    def fitting_batch(self, num_ranks: int, rows: int) -> int | Literal["auto"]:
        """Return `batch_size`, lowered so that a step of all ranks takes at most `rows` images, those of `train`."""
        if self.batch_size == "auto":
            return "auto"
        return max(1, min(self.batch_size, rows // (num_ranks * self.accumulate_steps)))

    def decisive(self) -> dict[str, Any]:
        """Return the settings that determine the result, with the values of `neutral`.

        Checkpoints kept, timeouts, environment, trace and histograms do not.
        """
        kept = {"checkpoint_seconds", "keep_checkpoints", "keep_checkpoint_days"}
        limits = {"timeout_seconds", "stall_timeout_seconds"}
        others = {"environment", "trace_steps", "histograms", "reader_threads"}
        names = type(self).model_fields.keys() - kept - limits - others
        if self.recipe != "given":
            return hashed_settings(self, names) | self.neutral | {"recipe_version": RECIPE_VERSION}
        # With the keys of release 0.1.0, whose settings had these values.
        left = {name: value for name, value in DEFAULTS.items() if getattr(self, name) in {None, "auto"}}
        left["augmentation"] = self.augmentation.model_copy(update={"by_recipe": False})
        return hashed_settings(self.model_copy(update=left), names) | self.neutral

    @property
    def neutral(self) -> dict[str, Any]:
        """Settings that do not affect the result of this run, with the value that stands for all of them.

        A head on cached features is never compiled, and its weights are the same for any number of threads. Those of
        whole networks differ in rounding, which training amplifies; on a GPU no thread of the CPU adds up gradients.
        """
        threads = {"num_threads": 0} if self.trains_head_only or self.device == "cuda" else {}
        return threads | ({"compile": False} if self.trains_head_only else {})


NETWORK = {name: ("train", name) for name in ("model", "weights")}
DEVICE_AND_EPOCHS = {name: ("train", name) for name in ("recipe", "device", "max_epochs", "freeze_backbone")}


class TrainRun(CacheRun):
    """Parameters of the flow `train`."""

    first_screen = NETWORK | IMAGE_SIZE | DEVICE_AND_EPOCHS | TABLES

    train: TrainConfig = TrainConfig()
