"""The check that all hosts of a training run see the same files, by files that each of them writes and lists."""

import os
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tasks.errors import WrongInput
from tasks.launch.remote import Agent
from tasks.object_store import PROBE
from tasks.paths import local_path
from tasks.storage import Storage
from tasks.train.spec import TrainingSpec

SEE_SECONDS = 10.0
"""Time in which a new file must be seen on the other hosts; network file systems keep listings for some seconds."""


def shared_folders(storage: Storage, cache_url: str) -> dict[str, str]:
    """Return the local folders that all hosts must share, with the settings that choose them."""
    tracking = storage.tracking.removeprefix("sqlite:///")
    database = None if tracking == storage.tracking else str(Path(tracking).parent)
    # Features are in the cache; locks are beside the data that they protect.
    named = {
        "storage.home": str(storage.checkpoints),
        "storage.cache": cache_url,
        "storage.artifacts": storage.artifacts,
        "storage.tracking": database,
    }
    found = {setting: local_path(url) for setting, url in named.items() if url is not None}
    return {setting: str(path) for setting, path in found.items() if path is not None}


def check_shared(spec: TrainingSpec, agents: Sequence[Agent]) -> None:
    """Check that this machine and all hosts see the files that each of them writes.

    Raises:
        WrongInput: A folder is not shared, or a host cannot write to it.
        HostLost: The connection to a host ended.
    """
    for setting, folder in shared_folders(spec.storage, spec.cache.url).items():
        Path(folder).mkdir(parents=True, exist_ok=True)
        _check_folder(setting, folder, agents)


def _check_folder(setting: str, folder: str, agents: Sequence[Agent]) -> None:
    mark = f"{PROBE}{secrets.token_hex(8)}-"
    names = [f"{mark}{number}" for number in range(len(agents) + 1)]
    written: list[Agent] = []
    what = f"{setting} is '{folder}', which the hosts of a training run must share"
    remedy = f"give {setting} a folder that has the same path on all of them, or a URL where it takes one"
    try:
        Path(folder, names[-1]).touch()
        for agent, name in zip(agents, names, strict=False):
            try:
                agent.ask("write", folder=folder, names=[name])
            except WrongInput as error:
                raise WrongInput(f"{what}, and where '{agent.host}' cannot write ({error}): {remedy}") from None
            written.append(agent)
        deadline = time.monotonic() + SEE_SECONDS
        while unseen := _find_unseen(folder, names, agents):
            if time.monotonic() > deadline:
                host, missing = unseen
                writers = [*(agent.host for agent in agents), "this machine"]
                raise WrongInput(
                    f"{what}: {host} does not see what {_writer(writers[names.index(missing)])} writes there; {remedy}"
                )
            time.sleep(0.2)
    finally:
        for agent, name in zip(written, names, strict=False):
            with suppress(Exception):  # A host that is lost: its error is raised already, or by what follows.
                agent.ask("remove", folder=folder, names=[name])
        Path(folder, names[-1]).unlink(missing_ok=True)


def _writer(name: str) -> str:
    return name if name == "this machine" else f"host '{name}'"


def _find_unseen(folder: str, names: Sequence[str], agents: Sequence[Agent]) -> tuple[str, str] | None:
    """Return a host that does not see a file, and the name of the file; None if all see all."""
    listed = set(os.listdir(folder))
    if missing := [name for name in names if name not in listed]:
        return "this machine", missing[0]
    for agent in agents:
        if missing := agent.ask("see", folder=folder, names=list(names))["missing"]:
            return f"host '{agent.host}'", missing[0]
    return None
