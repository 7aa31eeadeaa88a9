"""The check which files the hosts of a training run share, by files that each of them writes and lists."""

import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile

from tasks.errors import WrongInput
from tasks.launch.remote import Agent
from tasks.object_store import PROBE
from tasks.paths import local_path
from tasks.storage import Storage
from tasks.train.spec import TrainingSpec

SEE_SECONDS = 10.0
"""Time in which a new file must be seen on the other hosts; network file systems keep listings for some seconds."""

REMOVE_SECONDS = 5.0
"""Time limit of a host for the removal of its file, also on a cancellation."""


def shared_folders(storage: Storage, cache_url: str) -> dict[str, str]:
    """Return the local folders that all hosts must share, with the settings that choose them."""
    tracking = storage.tracking.removeprefix("sqlite:///")
    database = None if tracking == storage.tracking else str(Path(tracking).parent)
    # Locks are beside the data that they protect. Features are in storage.cache, and a given cache may be elsewhere.
    named = {
        "storage.home": str(storage.checkpoints),
        "storage.cache": storage.cache,
        "cache_ref": None if cache_url.startswith(f"{storage.cache.rstrip('/')}/") else cache_url,
        "storage.artifacts": None if storage.server_keeps_artifacts else storage.artifacts,
        "storage.tracking": database,
    }
    return {setting: str(path) for setting, url in named.items() if url is not None and (path := local_path(url))}


def check_shared(spec: TrainingSpec, agents: Sequence[Agent]) -> None:
    """Check that this machine and all hosts see the files that each of them writes.

    Without `distributed.shared_home`, no host may see the checkpoints of another one.

    Raises:
        WrongInput: A folder is not shared, or shared against the settings, or a host cannot write to it.
        HostLost: The connection to a host ended.
    """
    folders = shared_folders(spec.storage, spec.cache.url)
    if not spec.shares_home:
        _check_own(folders.pop("storage.home"), agents)
    for setting, folder in folders.items():
        Path(folder).mkdir(parents=True, exist_ok=True)
        _check_folder(setting, folder, agents)


@contextmanager
def _marks(
    folder: str, agents: Sequence[Agent], what: str, way_out: str, setting: str, *, make: bool
) -> Iterator[list[str]]:
    """Let each host write a file to a folder until the end of the block; yield the names of the files.

    Args:
        folder: The folder.
        agents: The agents of the hosts.
        what: Beginning of the error of a host that cannot.
        way_out: Its end.
        setting: The setting of the folder.
        make: Whether to create the folder.
    """
    mark = f"{PROBE}{secrets.token_hex(8)}-"
    names = [f"{mark}{index}" for index in range(len(agents))]
    written: list[tuple[Agent, str]] = []
    try:
        for agent, name in zip(agents, names, strict=True):
            try:
                agent.ask("mark", folder=folder, write=[name], make=make)
            except WrongInput as error:
                refusal = f"{what} where '{agent.host}' cannot write ({error})"
                raise WrongInput(refusal, setting=setting, way_out=way_out) from None
            written.append((agent, name))
        yield names
    finally:
        for agent, name in written:
            with suppress(Exception):  # A host that is lost: its error is raised already, or by what follows.
                agent.ask("mark", REMOVE_SECONDS, folder=folder, remove=[name])


def _check_own(folder: str, agents: Sequence[Agent]) -> None:
    """Check that the hosts do not share a folder, in which they would overwrite each other's files."""
    way_out = "give storage.home a folder that each host can write to"
    with _marks(folder, agents, f"storage.home is '{folder}',", way_out, "storage.home", make=True) as names:
        for agent in agents:
            of_others = [name for other, name in zip(agents, names, strict=True) if other.machine != agent.machine]
            missing = agent.ask("mark", folder=folder, see=of_others)["missing"]
            if seen := set(of_others) - set(missing):
                writer = agents[names.index(min(seen))].host
                raise WrongInput(
                    f"distributed.shared_home is false, but host '{agent.host}' sees what host '{writer}' writes to "
                    f"'{folder}'",
                    setting="distributed.shared_home",
                    way_out="set distributed.shared_home to true",
                )


def _check_folder(setting: str, folder: str, agents: Sequence[Agent]) -> None:
    """Check that this machine and all hosts share a folder."""
    what = f"{setting} is '{folder}', which the hosts of a training run must share"
    way_out = f"give {setting} a folder that has the same path on all of them, or a URL where it takes one"
    if setting == "storage.home":
        way_out += ", or set distributed.shared_home to false"
    with (
        NamedTemporaryFile(dir=folder, prefix=PROBE) as own,
        _marks(folder, agents, f"{what}, and", way_out, setting, make=False) as names,
    ):
        writers = dict(zip(names, (f"host '{agent.host}'" for agent in agents), strict=True))
        writers[Path(own.name).name] = "this machine"
        deadline = time.monotonic() + SEE_SECONDS
        while unseen := _find_unseen(folder, list(writers), agents):
            if time.monotonic() > deadline:
                host, missing = unseen
                raise WrongInput(
                    f"{what}: {host} does not see what {writers[missing]} writes there; {way_out}", setting=setting
                )
            time.sleep(0.2)


def _find_unseen(folder: str, names: list[str], agents: Sequence[Agent]) -> tuple[str, str] | None:
    """Return a host that does not see a file, and the name of the file; None if all see all."""
    listed = set(os.listdir(folder))
    if missing := [name for name in names if name not in listed]:
        return "this machine", missing[0]
    for agent in agents:
        if missing := agent.ask("mark", folder=folder, see=names)["missing"]:
            return f"host '{agent.host}'", missing[0]
    return None
