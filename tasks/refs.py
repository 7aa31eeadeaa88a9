"""What tasks hand each other: small frozen values that name things."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Ref(BaseModel):
    """A frozen name of something that exists outside the process."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class TableRef(Ref):
    """One version of a Delta table."""

    path: str
    version: int
    table_id: str = ""
    """Delta's own id of the table: one made anew at the same path has another. Empty where it is not known."""
    source: str = ""
    """Where the table's images come from, by its property; empty for a table that the flow etl did not make."""

    def is_version(self, other: "TableRef") -> bool:
        """Return whether both name the same version of the same table."""
        return (self.path, self.version, self.table_id) == (other.path, other.version, other.table_id)


class EtlReport(Ref):
    """The tables an ETL run left, and how many files of the source have each outcome."""

    images: TableRef
    files: TableRef
    stored: int
    duplicates: int
    quarantined: int
    read: int
    """New or changed files that this run read."""
    changed: bool
    """False where nothing was new and nothing was committed."""
    classes: dict[str, dict[str, int]]
    """Stored images by label and split."""


class CacheRef(Ref):
    """One materialised cache: its folder and the digest of its manifest."""

    url: str
    digest: str


class RunRef(Ref):
    """One finished MLflow run."""

    run_id: str


class ModelRef(Ref):
    """One registered model version and the run it came from."""

    name: str
    version: int
    run_id: str


class Promotion(Ref):
    """The champion after a promotion, and why it is that one."""

    champion: ModelRef
    outcome: Literal["promoted", "kept", "unchanged"]
    """Unchanged: the best run is the champion already."""
    challenger: RunRef
    """The best of the runs."""
    challenger_accuracy: float
    """Share of right test images, 0-1."""
    champion_accuracy: float | None
    """Of the champion before; None where there was none."""
    challenger_images: int | None
    """Test images that the challenger was measured on; None where its run does not say."""
    champion_images: int | None
    reason: str

    @property
    def sentence(self) -> str:
        """Return the decision in a sentence."""
        champion = f"{self.champion.name} version {self.champion.version}"
        said = {"promoted": "is the champion", "kept": "stays the champion", "unchanged": "is the champion already"}
        return f"{champion} {said[self.outcome]}: {self.reason}"


class PredictedImage(Ref):
    """The prediction of one image, for a person to look at."""

    path: str
    """In the source; the sha256 where no file is known."""
    label: str | None
    probability: float | None
    error: str | None


class PredictReport(Ref):
    """The predictions table after a run, and what the run added to it."""

    predictions: TableRef
    model: ModelRef
    predicted: int
    errors: int
    seconds: float
    """Wall time of inference and write, session start excluded."""
    least_sure: tuple[PredictedImage, ...] = Field((), repr=False)
    """A sample of all predictions by this model: errors first, then the least probable."""


class TableMaintenance(Ref):
    """What maintenance did to one table."""

    table: TableRef
    files_compacted: int
    files_written: int
    files_deleted: int
    bytes_deleted: int
    retention_hours: int
    """Versions younger than this were kept, whatever they are needed for."""
    kept_versions: list[int]
    """Versions that registered models were trained from."""


class MaintenanceReport(Ref):
    """What maintenance did, table by table."""

    tables: list[TableMaintenance]


class TrialReport(Ref):
    """What came of one trial of a search for hyper-parameters, or of a training that was none."""

    number: int | None
    state: Literal["complete", "pruned"]
    value: float | None
    """Of the metric that `train.monitor` names; None where the training diverged before its first epoch ended."""
    run_id: str | None
    """Its MLflow run."""


class OverfitReport(Ref):
    """How the loss of one batch fell."""

    losses: list[float]
    """Mean cross-entropy before each step, nats; the last one is that after the last step."""
    num_images: int
    """Images of the batch."""


class ParameterGradient(Ref):
    """What the gradients of one trained parameter were over some batches."""

    name: str
    elements: int
    norm: float | None
    """The greatest norm over the batches; None where no gradient ever came."""
    finite: bool
    """Whether every value of every gradient was a number."""


class GradientReport(Ref):
    """The gradients of every trained parameter."""

    parameters: list[ParameterGradient]
    batches: int


class MetricPair(Ref):
    """One metric of a run and of its repetition; None where one of them has it not."""

    metric: str
    before: float | None
    now: float | None

    @property
    def agrees(self) -> bool:
        """Whether both have it, to the last digit."""
        return self.before is not None and self.before == self.now


class RepeatReport(Ref):
    """A repeated training beside the first."""

    run_id: str
    """The MLflow run of the repetition."""
    repeat_of: str
    """The MLflow run that was repeated."""
    differences: list[str]
    """What was not as it was: packages, code, device, weights, settings; a sentence each."""
    metrics: list[MetricPair]
    """Of the splits val and test."""
    metrics_agree: bool
    weights_equal: bool
    """Whether the trained weights are the same, bit for bit."""
