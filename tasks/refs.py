"""What tasks hand each other: small frozen values that name things."""

from typing import Literal

from pydantic import BaseModel, ConfigDict


class Ref(BaseModel):
    """A frozen name of something that exists outside the process."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class TableRef(Ref):
    """One version of a Delta table."""

    path: str
    version: int
    table_id: str = ""
    """Delta's own id of the table: one made anew at the same path has another. Empty where it is not known."""


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
    """Stored pictures by label and split."""


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


class PredictReport(Ref):
    """The predictions table after a run, and what the run added to it."""

    predictions: TableRef
    model: ModelRef
    predicted: int
    errors: int
    seconds: float
    """Wall time of inference and write, session start excluded."""


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
    pictures: int
    """Pictures of the batch."""


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
