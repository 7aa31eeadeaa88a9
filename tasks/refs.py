"""References and reports that tasks pass to each other: small frozen models, and the names of the splits."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

TRAIN, VAL, TEST = "train", "val", "test"
SPLITS = (TRAIN, VAL, TEST)


class Ref(BaseModel):
    """A frozen reference to something outside the process."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class TableRef(Ref):
    """One version of a Delta table."""

    path: str
    version: int
    table_id: str = ""
    """Delta's own id of the table: a table recreated at the same path has another. Empty if unknown."""
    source: str = ""
    """Source of the table's images, by its property; empty for a table that the flow etl did not create."""

    def is_version(self, other: "TableRef") -> bool:
        """Return whether both name the same version of the same table."""
        return (self.path, self.version, self.table_id) == (other.path, other.version, other.table_id)


class EtlReport(Ref):
    """The tables after an ETL run, and the number of source files by outcome."""

    images: TableRef
    files: TableRef
    stored: int
    duplicates: int
    quarantined: int
    ignored: int = 0
    """Number of files with neither the name nor the content of an image."""
    left_by_systems: int = 0
    """Number of hidden files, and of files and folders that systems make."""
    outside_sample: int = 0
    """Number of images that `etl.sample_fraction` leaves out."""
    read: int
    """Number of new or changed files that this run read."""
    changed: bool
    """False if nothing was new and nothing was committed."""
    classes: dict[str, dict[str, int]]
    """Number of stored images by label and split."""


class CacheRef(Ref):
    """One materialised training cache: its folder and the digest of its manifest."""

    url: str
    digest: str
    table: TableRef | None = None
    """The table that asked for it, which may be another one than it was built from; None: the one of its manifest."""


class RunRef(Ref):
    """One finished MLflow run."""

    run_id: str


class ModelRef(Ref):
    """One registered model version and the MLflow run that logged it."""

    name: str
    version: int
    run_id: str


class PredictedImage(Ref):
    """The prediction of one image, for display."""

    path: str
    """Path in the source, or the SHA-256 if no file is known."""
    label: str
    probability: float
    unknown_score: float | None = None
    """As in the table `predictions`; None if the model has no thresholds, or the row is of an earlier release."""
    thumbnail: str = ""
    """A small JPEG as a data URI; empty if the image cannot be shown."""


class FailedFile(Ref):
    """A file without a prediction."""

    path: str
    error: str


class Answers(Ref):
    """The answers for all files of a table or a source, those of earlier runs included."""

    csv: str = ""
    """CSV file with all of them; empty if there was nothing to predict."""
    num_files: int = 0
    num_failed: int = 0
    num_ignored: int = 0
    """Files of a source with neither the name nor the content of an image."""
    left_by_systems: int = 0
    """Hidden files of a source, and files and folders that systems make."""
    failed: tuple[FailedFile, ...] = ()
    """The first failed files by path."""
    least_confident: tuple[PredictedImage, ...] = Field((), repr=False)
    """The images of the lowest probabilities, in ascending order."""


class PredictReport(Answers):
    """The predictions table after a run, and what the run added to it."""

    predictions: TableRef
    model: ModelRef
    predicted: int
    errors: int
    seconds: float
    """Wall time of inference and write, without the start of the Spark session."""
    unlearned: tuple[str, ...] = ()
    """Labels of the table that are not classes of the model; empty if nothing was predicted."""
    inputs: TableRef | None = None
    """Table of the predicted files; None for images of a table."""
    unreadable: int = 0
    """Number of files of a source that cannot be read."""


class StreamReport(Answers):
    """The predictions table after a run of the stream, what the run added to it, and how far the stream is behind."""

    predictions: TableRef
    model: ModelRef
    """The version of the last batch; another one had the alias in batches before it if the alias was moved."""
    batches: int
    predicted: int
    errors: int
    seconds: float
    """Wall time of the batches, without the start of the Spark session."""
    versions_behind: int
    """Versions of the table that change rows and that were not processed; 0 for a folder or URL."""
    seconds_behind: float
    """Age of the oldest of these versions, or of the oldest of these files, in seconds."""
    files_behind: int = 0
    """Files of the folder or URL that were not processed; 0 for a table."""
    unreadable: int = 0
    """Files that could not be read."""
    unlearned: tuple[str, ...] = ()
    """Labels of predicted images that are not classes of the model."""


class ExplainedImage(Ref):
    """An image, and the file with its heat map."""

    path: str
    """The file, or the sha256 of an image of the table."""
    label: str
    """The class that the heat map is for."""
    probability: float
    file: str
    thumbnail: str = Field("", repr=False)


class ExplainReport(Ref):
    """The heat maps of some images."""

    model: ModelRef
    folder: str
    images: tuple[ExplainedImage, ...]


class ServeReport(Ref):
    """A service that has ended."""

    url: str
    model: ModelRef
    """The version that it began with."""
    seconds: float
    """Wall time from the first answer that it was ready."""


class VersionAccuracy(Ref):
    """Accuracy of a version on the images of requests that have a label."""

    version: int
    images: int
    accuracy: float
    """Share (0-1) of these images whose label it has given."""
    interval: tuple[float, float]
    """Its 95 % interval."""


class AskedImage(Ref):
    """An image of a request that needs a label, since champion and challenger differ on it."""

    request_id: str
    image: int
    sha256: str
    champion_label: str
    challenger_label: str
    thumbnail: str = ""
    """A small JPEG as a data URI; empty if the service does not keep images."""


LiveOutcome = Literal["promoted", "better", "worse", "ended", "undecided"]


class LiveReport(Ref):
    """The comparison of a challenger with the champion by their answers in service."""

    champion: ModelRef
    """The champion after it."""
    challenger: int
    """Number of the version that was compared with the champion."""
    outcome: LiveOutcome
    """better: it may become the champion. ended: `live.max_labels` without a decision; the champion stays."""
    line: str
    """The result in a sentence."""
    num_compared: int
    """Images that both have predicted."""
    num_differing: int
    num_labels: int
    num_better: int
    """Images on which only the challenger is right."""
    num_worse: int
    p_value: float
    """Always-valid p-value of the hypothesis that the challenger is not better."""
    accuracies: tuple[VersionAccuracy, ...]
    asked: tuple[AskedImage, ...] = Field((), repr=False)


class TableMaintenance(Ref):
    """Result of the maintenance of one table."""

    table: TableRef
    files_compacted: int
    files_written: int
    files_deleted: int
    bytes_deleted: int
    retention_hours: int
    """Versions younger than this were kept in any case."""
    kept_versions: list[int]
    """Versions that registered models were trained from."""


class MaintenanceReport(Ref):
    """Result of a maintenance run, by table."""

    tables: list[TableMaintenance]


TRIAL_TAG = "lakevision.trial"
"""Tag of the training run of a trial, with its number."""


class TrialReport(Ref):
    """Result of one trial of a hyper-parameter search, or of a training run outside a search."""

    number: int | None
    state: Literal["complete", "pruned"]
    value: float | None
    """Value of the metric `train.monitor`; None if training diverged before the end of the first epoch."""
    run_id: str | None
    """MLflow run of the trial."""


class OverfitReport(Ref):
    """Loss of one batch while it was overfitted."""

    losses: list[float]
    """Mean cross-entropy before each step and after the last one, in nats."""
    num_images: int
    """Number of images in the batch."""


class ParameterGradient(Ref):
    """Gradients of one trained parameter over some batches."""

    name: str
    elements: int
    norm: float | None
    """The largest norm over the batches; None if there was never a gradient."""
    finite: bool
    """True if all values of all gradients were finite."""


class GradientReport(Ref):
    """Gradients of all trained parameters."""

    parameters: list[ParameterGradient]
    batches: int


class ClassOutlook(Ref):
    """Worth of more images of a class, while those of the other classes grow alike."""

    name: str
    images: int
    """Images of the class in the split `train`; a verdict is about as many more."""
    accuracy: float
    """Expected share of its images that are classified correctly (0-1)."""
    gain: tuple[float, float, float]
    """Expected increase of it with twice the images, and its 95 % interval."""


class ConfusedPair(Ref):
    """A class, and another class for which its images are taken."""

    true: str
    predicted: str
    wrong: float
    """Held-out images of the class that were taken for the other one, a mean over repeats."""
    images: int
    """Held-out images of the class."""
    share: tuple[float, float, float]
    """Their share (0-1), and its 95 % confidence interval."""


class Verdict(Ref):
    """Expected result of training a head, estimated from the features of its frozen backbone."""

    line: str
    """The verdict in a sentence, or why there is none."""
    accuracy: float | None = None
    """Expected test accuracy (0-1); None without a verdict."""
    interval: tuple[float, float] | None = None
    """95 % interval of the accuracy that the test images will measure."""
    worth_of_doubling: float | None = None
    """Expected increase of the accuracy with twice the images."""
    curve: tuple[tuple[int, float], ...] = Field((), repr=False)
    """Numbers of training images, and the accuracy on held-out images that was measured after training on them."""
    weakest: tuple[ClassOutlook, ...] = Field((), repr=False)
    confused: tuple[ConfusedPair, ...] = Field((), repr=False)
    fine_tuning_images_per_second: float | None = None
    """Speed of training all layers here; None if a step does not fit into memory."""


class SuspectedLabel(Ref):
    """An image whose label is suspected to be wrong."""

    sha256: str
    path: str
    """Its first path in the source."""
    label: str
    suggested: str
    """Class that is more probable by the images of other folds."""
    score: float
    """Logarithm of the label's probability by that of the suggested class; below 0."""
    thumbnail: str = ""
    """A small JPEG as a data URI."""


class LabelErrorReport(Ref):
    """Suspected labels of a version of the table `images`."""

    line: str
    """The result in a sentence."""
    images: int
    suspected: int
    """Images for which another class is more probable than their label."""
    expected: float
    """Number of labels that are expected to be wrong."""
    suspects: str
    """Path of the table with all suspected labels."""
    pairs: tuple[tuple[str, str, int], ...] = ()
    """Label, suggested class, and number of images, of the most suspicious as many as are expected to be wrong."""
    shown: tuple[SuspectedLabel, ...] = Field((), repr=False)


class MetricPair(Ref):
    """One metric of a run and of its repetition; None for a run that lacks it."""

    metric: str
    before: float | None
    now: float | None

    @property
    def agrees(self) -> bool:
        """True if both runs have the metric, with exactly the same value."""
        return self.before is not None and self.before == self.now


class RepeatReport(Ref):
    """Comparison of a repeated training run with the original one."""

    run_id: str
    """MLflow run of the repetition."""
    repeat_of: str
    """MLflow run that was repeated."""
    differences: list[str]
    """Differences in packages, code, device, weights and settings, one sentence for each."""
    metrics: list[MetricPair]
    """Metrics of the splits val and test."""
    metrics_agree: bool
    weights_equal: bool
    """True if the trained weights are bitwise equal."""
