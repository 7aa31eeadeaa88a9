"""Audit of every locked package against security advisories, by pip-audit.

The jars of Spark and Delta and the packages of the operating system are not checked: pip-audit supports Python packages
only.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from deployments.setup.patched_petastorm import patch_petastorm

ROOT = Path(__file__).resolve().parents[2]
SOURCES = {"osv": "OSV (api.osv.dev)", "pypi": "PyPI (pypi.org)"}

NOTHING_FOUND, FOUND, NOT_CHECKED = 0, 1, 2
"""Exit codes."""


class SourceUnavailable(RuntimeError):
    """Raised where a source of advisories does not answer; the message is pip-audit's last line of output."""


def locked_packages() -> str:
    """Return every package that set-up installs as pinned requirements: those of the lock file, Horovod, and uv.

    petastorm and Horovod are named by the release that set-up patches.
    """
    command = ["uv", "export", "--frozen", "--no-emit-project", "--all-groups", "--no-hashes", "--quiet"]
    command += ["--no-emit-package", "petastorm"]
    locked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    setup = ROOT / "deployments" / "setup"
    horovod = re.search(r"^horovod_version=(\S+)$", setup.joinpath("build_horovod.sh").read_text(), re.MULTILINE)
    uv = re.search(r"^uv==\S+", setup.joinpath("uv.txt").read_text(), re.MULTILINE)
    assert horovod, "build_horovod.sh does not set horovod_version"
    assert uv, "uv.txt does not pin a version"
    return f"{locked}\nhorovod=={horovod[1]}\npetastorm=={patch_petastorm.VERSION}\n{uv[0]}\n"


def run_pip_audit(requirements: str, source: str, url: str | None, ignored: Iterable[str]) -> dict[str, Any]:
    """Return pip-audit's report on pinned requirements.

    Args:
        requirements: Lines of `name==version`.
        source: A key of SOURCES.
        url: Address of the OSV server; None for the public one.
        ignored: Ids of findings that the report leaves out.

    Raises:
        SourceUnavailable: pip-audit printed no report.
    """
    with tempfile.TemporaryDirectory() as scratch:
        pinned = Path(scratch, "requirements.txt")
        pinned.write_text(requirements)
        command = [sys.executable, "-m", "pip_audit", "--disable-pip", "--no-deps", "--format", "json"]
        command += ["--progress-spinner", "off", "--vulnerability-service", source, "--requirement", str(pinned)]
        command += [word for finding in ignored for word in ("--ignore-vuln", finding)]
        done = subprocess.run(
            [*command, *(["--osv-url", url] if url else [])], capture_output=True, text=True, check=False
        )
    try:
        report: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        lines = done.stderr.strip().splitlines() or ["it printed nothing"]
        raise SourceUnavailable(lines[-1]) from None
    return report


def judge(report: dict[str, Any], source: str) -> int | None:
    """Print the findings of a report; return the exit code, or None if no package was checked.

    Skipped packages were not checked, whatever pip-audit's summary says.
    """
    packages, num_found = report["dependencies"], 0
    skipped = [package["name"] for package in packages if "skip_reason" in package]
    if len(skipped) == len(packages):
        print(f"audit: {source} knows none of {len(skipped)} packages", file=sys.stderr)
        return None
    for package in packages:
        for found in package.get("vulns", ()):
            fixed = ", ".join(found["fix_versions"]) or "no version"
            ids = ", ".join(sorted([found["id"], *found["aliases"]]))
            print(f"FOUND: {package['name']} {package['version']}: {ids} (fixed in {fixed})")
            num_found += 1
    if skipped:
        print(f"audit: {len(skipped)} packages are unknown to {source}: {', '.join(skipped)}")
    print(f"audit: {len(packages) - len(skipped)} packages checked against {source}: {num_found} findings")
    return FOUND if num_found else NOT_CHECKED if skipped else NOTHING_FOUND


def main(arguments: Sequence[str] | None = None) -> int:
    """Query the sources in turn until one answers, and return the exit code."""
    parser = argparse.ArgumentParser(prog="audit", description=__doc__)
    parser.add_argument("--source", choices=sorted(SOURCES), help="query only this source")
    parser.add_argument("--osv-url", help="address of another server with OSV's interface")
    parser.add_argument("--requirements", type=Path, help="check these instead of the locked packages")
    parser.add_argument("--ignore-vuln", action="append", default=[], metavar="ID", help="ignore this finding")
    parsed = parser.parse_args(arguments)
    try:
        requirements = parsed.requirements.read_text() if parsed.requirements else locked_packages()
    except FileNotFoundError as error:
        parser.error(f"'{error.filename}' was not found: run 'make audit', which has uv on its PATH")
    for source in [parsed.source] if parsed.source else SOURCES:
        try:
            code = judge(run_pip_audit(requirements, source, parsed.osv_url, parsed.ignore_vuln), SOURCES[source])
        except SourceUnavailable as error:
            print(f"audit: {SOURCES[source]} could not be reached: {error}", file=sys.stderr)
            continue
        if code is not None:
            return code
    print("audit: nothing was checked: no source of advisories answered", file=sys.stderr)
    return NOT_CHECKED


if __name__ == "__main__":
    sys.exit(main())
