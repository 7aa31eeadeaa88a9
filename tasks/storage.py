"""Where things lie: the folders and URLs of one run, resolved once."""

import os
from pathlib import Path
from urllib.parse import unquote_to_bytes, urlparse

from pydantic import BaseModel, ConfigDict

from tasks.config import StorageConfig
from tasks.credentials import without_credentials
from tasks.environment import lakevision_home, tracking_uri
from tasks.errors import WrongInput


class Storage(BaseModel):
    """Absolute folders or URLs of everything a run reads and writes."""

    model_config = ConfigDict(frozen=True)

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
        """The tracking server or database for messages: of a user name and password, three stars are left."""
        return without_credentials(self.tracking)

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
        """Folder of the checkpoints of running trainings; local or on a shared file system."""
        return Path(self.home) / "checkpoints"

    def as_config(self) -> StorageConfig:
        """Return the settings that resolve to this storage in another process, whatever its environment.

        A tracking URI with a password is left out: settings are shown to everybody, and every process takes such a URI
        from its own environment.
        """
        shown = self.tracking_shown == self.tracking
        return StorageConfig(**self.model_dump() | {"tracking": self.tracking if shown else None})


def local_path(url: str) -> Path | None:
    """Return the path behind a folder or file:// URL, or None for an object store.

    Raises:
        WrongInput: A file:// URL names another machine, as one with too few slashes does.
    """
    if urlparse(url).scheme != "file":
        return None if urlparse(url).scheme else Path(url)
    # Not urlparse's path: a question mark or number sign in a folder's name begins nothing here.
    rest = url[len("file:") :]
    if rest.startswith("//"):
        host, slash, path = rest[2:].partition("/")
        if host not in {"", "localhost"}:
            raise WrongInput(f"'{url}' names a folder of the machine '{host}': write file:///{host}{slash}{path}")
        rest = slash + path
    return Path(os.fsdecode(unquote_to_bytes(rest)))


def resolved(url: str) -> str:
    """Return a folder with its symbolic links resolved, or its URL, so that two names of one place are equal.

    Raises:
        WrongInput: As `local_path`.
    """
    folder = local_path(url)
    return url.rstrip("/") if folder is None else os.path.realpath(folder)


def is_inside(path: str, root: str) -> bool:
    """Say whether a path, its links followed, leads to something below `root`, which has none."""
    return os.path.realpath(path).startswith(root + os.sep)


def absolute_url(url: str) -> str:
    """Return a folder with its whole path, without `file://` and `~`; the URL of an object store as it is.

    Raises:
        WrongInput: As `local_path`.
    """
    path = local_path(url)
    return url if path is None else str(path.expanduser().absolute())


def _tables_url(tables: str, home: str) -> str:
    """Return the folder or URL of the tables; a lone name is a folder of the home.

    So a deployment may preset tables of its own without knowing the home.
    """
    is_name = "/" not in tables and not urlparse(tables).scheme and tables not in {".", ".."} and tables[0] != "~"
    return f"{home}/{tables}" if is_name else absolute_url(tables)


def tracking_file(home: str) -> str:
    """Return the tracking database of a home folder, where no other is asked for."""
    return f"sqlite:///{home}/mlflow.db"


def artifacts_folder(home: str) -> str:
    """Return the artifacts' folder of a home folder, where no other is asked for."""
    return f"{home}/artifacts"


def resolve_storage(config: StorageConfig) -> Storage:
    """Fill what is empty from `home`, and make every folder absolute; a lone name of `tables` lies under `home`.

    Raises:
        WrongInput: `home` is no local folder.
    """
    home = absolute_url(config.home) if config.home else str(lakevision_home())
    if local_path(home) is None:
        raise WrongInput(
            f"storage.home is '{home}', which is no local folder: logs and checkpoints lie there; "
            "set storage.tables, storage.cache and storage.artifacts to URLs instead"
        )
    return Storage(
        home=home,
        tables=_tables_url(config.tables or "tables", home),
        cache=absolute_url(config.cache or f"{home}/cache"),
        artifacts=absolute_url(config.artifacts or artifacts_folder(home)),
        tracking=config.tracking or tracking_uri() or tracking_file(home),
    )
