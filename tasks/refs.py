"""What tasks hand each other: small frozen values that name things."""

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
    retention_hours: int
    """How far back VACUUM kept files."""
    kept_versions: list[int]
    """Versions that registered models were trained from."""


class MaintenanceReport(Ref):
    """What maintenance did, table by table."""

    tables: list[TableMaintenance]
