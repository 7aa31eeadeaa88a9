"""Storage locations of a run: folders and URLs, resolved once."""

from pathlib import Path
from urllib.parse import urlparse

from pydantic import BaseModel

from tasks.config.storage import StorageConfig
from tasks.credentials import ShownCredential, check_url, without_credentials
from tasks.environment import DEFAULT_HOME, artifacts_url, lakevision_home, tracking_uri
from tasks.errors import WrongInput
from tasks.paths import absolute_url, local_path


class Storage(BaseModel, frozen=True):
    """Absolute folders or URLs of the data that a run reads and writes."""

    home: str
    tables: str
    cache: str
    artifacts: str
    tracking: str

    def table(self, name: str) -> str:
        """Return the path or URL of the Delta table `name`."""
        return f"{self.tables.rstrip('/')}/{name}"

    @property
    def tracking_shown(self) -> str:
        """Tracking server or database for messages, with `***` in place of a user name and password."""
        return without_credentials(self.tracking)

    @property
    def chosen_artifacts(self) -> str | None:
        """Location of MLflow's artifacts if a setting or the environment chose it; None for the default."""
        return None if self.artifacts == artifacts_folder(self.home) else self.artifacts

    @property
    def server_keeps_artifacts(self) -> bool:
        """The choice of a tracking server for the location of artifacts, since no setting chose one."""
        return self.tracking.startswith("http") and self.chosen_artifacts is None

    @property
    def digits(self) -> Path:
        """Folder of the built-in digits; always local."""
        return Path(self.home) / "digits"

    @property
    def logs(self) -> Path:
        """Folder of log files; always local."""
        return Path(self.home) / "logs"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints of unfinished training runs; local or on a shared file system."""
        return Path(self.home) / "checkpoints"

    @property
    def home_entries(self) -> tuple[str, ...]:
        """Beginnings of the names of the entries in the home that a run writes to; the rest is elsewhere."""
        names = [name for name in ("tables", "cache", "artifacts") if getattr(self, name) == f"{self.home}/{name}"]
        if self.server_keeps_artifacts:
            names.remove("artifacts")
        if self.tracking == tracking_file(self.home):
            names.append("mlflow.db")
        return ("checkpoints", "logs", "spark-temp", "studies", "weights", *names)

    def as_config(self) -> StorageConfig:
        """Return the settings that resolve to this storage in another process, regardless of its environment.

        A tracking URI with a password is omitted: settings are visible to everybody, and each process takes such a URI
        from its own environment.
        """
        shown = self.tracking_shown == self.tracking
        return StorageConfig(**self.model_dump() | {"tracking": self.tracking if shown else None})

    @property
    def options(self) -> list[str]:
        """Command-line options that choose this storage in a shell of the current folder, whatever its environment.

        A tracking URI with a password is omitted, as in `as_config`.
        """
        tables = self.tables.removeprefix(f"{self.home}/")
        if not _is_name(tables):
            tables = self.tables
        chosen = {
            "--storage.home": (self.home, str(Path(DEFAULT_HOME).absolute())),
            "--tables": (tables, "tables"),
            "--storage.cache": (self.cache, f"{self.home}/cache"),
            "--storage.artifacts": (self.artifacts, artifacts_folder(self.home)),
            "--storage.tracking": (self.tracking, tracking_file(self.home)),
        }
        if self.tracking_shown != self.tracking:
            del chosen["--storage.tracking"]
        return [text for option, (value, default) in chosen.items() if value != default for text in (option, value)]


def _is_name(tables: str) -> bool:
    """Return whether the tables are named by a folder in the home."""
    return "/" not in tables and not urlparse(tables).scheme and tables not in {".", ".."} and tables[0] != "~"


def tracking_file(home: str) -> str:
    """Return the default tracking database of a home folder."""
    return f"sqlite:///{home}/mlflow.db"


def artifacts_folder(home: str) -> str:
    """Return the default artifacts folder of a home folder."""
    return f"{home}/artifacts"


def _default_artifacts(home: str) -> str:
    """Return the location of artifacts without a setting: $LAKEVISION_ARTIFACTS, or the folder of the home."""
    try:
        return check_url(artifacts_url() or artifacts_folder(home))
    except ShownCredential as error:
        text = f"LAKEVISION_ARTIFACTS is not accepted: {error}"
        raise WrongInput.complete(text, way_out=error.way_out) from None


def resolve_storage(config: StorageConfig) -> Storage:
    """Resolve empty locations to defaults under `home`, and relative folders to absolute ones.

    A name without a slash in `tables` is a folder under `home`, so that a deployment can preset its own tables without
    knowing the home.

    Raises:
        WrongInput: `home` is not a local folder, or $LAKEVISION_ARTIFACTS has a password.
    """
    home = absolute_url(config.home) if config.home else str(lakevision_home())
    if local_path(home) is None:
        raise WrongInput(
            f"storage.home is '{home}', which is not a local folder, as logs and checkpoints require",
            setting="storage.home",
            way_out="set storage.tables, storage.cache and storage.artifacts to URLs instead",
        )
    tables = config.tables or "tables"
    return Storage(
        home=home,
        tables=f"{home}/{tables}" if _is_name(tables) else absolute_url(tables),
        cache=absolute_url(config.cache or f"{home}/cache"),
        artifacts=absolute_url(config.artifacts or _default_artifacts(home)),
        tracking=config.tracking or tracking_uri() or tracking_file(home),
    )


def csv_file(given: str | None, storage: Storage) -> Path:
    """Return the path of the CSV file with the answers, from the setting `predict.csv`.

    Raises:
        WrongInput: It is the URL of a store.
    """
    if not given:
        tables = storage.tables.rstrip("/").rpartition("/")[2]
        return Path(storage.home, "predictions.csv" if tables == "tables" else f"predictions-{tables}.csv")
    if local_path(given) is None:
        raise WrongInput(
            f"predict.csv is '{given}', but it is written as a local file",
            setting="predict.csv",
            way_out="give a local path, or read the table of predictions in the store",
        )
    is_name = "/" not in given and given[0] != "~"
    return Path(storage.home, given) if is_name else Path(absolute_url(given))
