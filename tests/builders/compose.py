"""The services of docker/compose.yaml without containers: commands and environments as an engine would give them."""

import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tasks.environment import download_cache
from tests.builders.processes import ROOT

DOCKER = ROOT / "docker"
VARIABLE = re.compile(r"\$\{(\w+)(?:(:[-?])([^}]*))?\}")
SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"
"""PATH of a Debian image."""
POSTGRES_FOLDERS = sorted(map(str, Path("/usr/lib/postgresql").glob("*/bin")), reverse=True)
"""Folders in which Debian keeps PostgreSQL's programs, one per version, the newest first."""
SERVER_PATH = os.pathsep.join([*POSTGRES_FOLDERS, SYSTEM_PATH])
"""PATH of the programs of PostgreSQL and Redis."""


@cache
def compose_file() -> dict[str, Any]:
    """Return the parsed compose.yaml."""
    loaded: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    return loaded


@cache
def image_environment() -> dict[str, str]:
    """Return the variables that the CPU image sets: those of the last stage of its Dockerfile."""
    last_stage = (DOCKER / "Dockerfile.cpu").read_text().rpartition("\nFROM ")[2].replace("\\\n", " ")
    instructions = re.findall(r"^ENV (.*)$", last_stage, re.MULTILINE)
    words = [word for instruction in instructions for word in instruction.split()]
    # The arguments of the build are empty by default.
    return {name: VARIABLE.sub("", value) for name, value in (word.split("=", 1) for word in words)}


def generated_secrets(folder: Path) -> dict[str, str]:
    """Run secrets.sh in a folder, and return the passwords and logins that it wrote."""
    script = folder / "secrets.sh"
    shutil.copy(DOCKER / "secrets.sh", script)
    subprocess.run(["sh", str(script)], check=True)
    return dict(line.split("=", 1) for line in (folder / ".env").read_text().splitlines())


@dataclass(frozen=True)
class Compose:
    """The project of compose.yaml, whose services have loopback addresses of their own in place of host names."""

    variables: Mapping[str, str]
    """Values of docker/.env."""
    data: Path
    """Folder in place of the volume `lakevision`."""
    network: str = field(default_factory=lambda: f"127.{random.randint(1, 254)}.{random.randint(1, 254)}")
    """Loopback addresses are this and one number more: services of two tests at once do not meet on a port."""

    def service(self, name: str) -> dict[str, Any]:
        """Return the definition of a service."""
        definition: dict[str, Any] = compose_file()["services"][name]
        return definition

    def address(self, name: str) -> str:
        """Return the address of a service."""
        return f"{self.network}.{1 + list(compose_file()['services']).index(name)}"

    def environment(self, name: str) -> dict[str, str]:
        """Return the environment of a service's container: that of its image, and its own."""
        service = self.service(name)
        own = service.get("environment", {})
        given = {key: self._interpolated(value) for key, value in own.items() if value is not None}
        # Without a value, a variable is passed on from the shell or docker/.env where it is set there.
        passed = {key: self.variables[key] for key, value in own.items() if value is None and key in self.variables}
        image = image_environment() if "CPU_IMAGE" in service["image"] else {"PATH": SERVER_PATH}
        return {key: self._on_this_machine(value, name) for key, value in (image | given | passed).items()}

    def command(self, name: str) -> list[str]:
        """Return the command of a service, which listens on the service's address."""
        words = [self._interpolated(word) for word in self.service(name)["command"]]
        hosts = [after == "--allowed-host" for after in ["", *words[:-1]]]
        return [
            self.address(word) if is_host else word.replace("0.0.0.0", self.address(name))  # noqa: S104  # replaced
            for word, is_host in zip(words, hosts, strict=True)
        ]

    def health_check(self, name: str) -> list[str]:
        """Return the command that checks a service, which ends with 0 where it is healthy."""
        kind, *words = self.service(name)["healthcheck"]["test"]
        words = [word.replace("127.0.0.1", self.address(name)) for word in words]
        # The client of Redis has no variable for the host.
        words = [word.replace("redis-cli", f"redis-cli -h {self.address(name)}") for word in words]
        return ["sh", "-c", *words] if kind == "CMD-SHELL" else words

    def config(self, name: str) -> str:
        """Return the content of an inline file."""
        return self._interpolated(compose_file()["configs"][name]["content"])

    def _interpolated(self, text: str) -> str:
        def value(found: re.Match[str]) -> str:
            name, operator, rest = found.groups()
            if operator == ":-":
                return self.variables.get(name) or str(rest)
            return self.variables[name]

        return VARIABLE.sub(value, str(text))

    def _on_this_machine(self, value: str, name: str) -> str:
        """Return a value with the paths and host names of containers replaced by those of this machine."""
        if value == "127.0.0.1":  # loopback interface of one container
            return self.address(name)
        for inside, here in {
            "/opt/lakevision/app/.venv/bin": str(Path(sys.executable).parent),
            "/opt/lakevision/cache": str(download_cache()),
            "/var/lib/lakevision": str(self.data),
            "$PATH": SYSTEM_PATH,
        }.items():
            value = value.replace(inside, here)
        names = "|".join(compose_file()["services"])
        return re.sub(rf"(?<=[/@])({names})(?=:\d+(?:/|$))", lambda found: self.address(found[1]), value)
