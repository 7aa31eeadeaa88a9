"""Tests of the audit of the lock file: pip-audit itself, against a local server with OSV's interface."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from deployments.checks.audit import FOUND, NOT_CHECKED, NOTHING_FOUND, judge, main
from tasks.system.listening import free_port

FINDING = {
    "id": "GHSA-aaaa-bbbb-cccc",
    "aliases": ["CVE-2026-1234"],
    "summary": "It does too much.",
    "affected": [
        {
            "package": {"name": "careless", "ecosystem": "PyPI"},
            "ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "2.0"}]}],
        }
    ],
}


class Advisories(BaseHTTPRequestHandler):
    """Handler that answers like OSV, with a finding for one package."""

    def do_POST(self) -> None:
        """Answer a query."""
        query = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        body = json.dumps({"vulns": [FINDING]} if query["package"]["name"] == "careless" else {}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_arguments: object) -> None:
        """Print nothing."""


@pytest.fixture
def osv() -> Iterator[str]:
    """Yield the address of a local server with OSV's interface."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Advisories)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1/query"
    server.shutdown()
    server.server_close()


def audit(folder: Path, requirements: str, url: str, *arguments: str) -> int:
    """Audit the requirements, and return the exit code."""
    (folder / "requirements.txt").write_text(requirements)
    file = ["--requirements", str(folder / "requirements.txt")]
    return main(["--source", "osv", "--osv-url", url, *file, *arguments])


def test_finding_fails_the_audit_unless_it_is_ignored(
    tmp_path: Path, osv: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A finding is ignored by any of its ids."""
    both = "careless==1.0\nsound==1.0\n"
    assert audit(tmp_path, both, osv) == FOUND
    printed = capsys.readouterr().out
    assert "FOUND: careless 1.0: CVE-2026-1234, GHSA-aaaa-bbbb-cccc (fixed in 2.0)" in printed
    assert "2 packages checked against OSV (api.osv.dev): 1 findings" in printed
    for known, expected in (("CVE-2026-1234", NOTHING_FOUND), ("GHSA-aaaa-bbbb-cccc", NOTHING_FOUND), ("CVE-1", FOUND)):
        assert audit(tmp_path, both, osv, "--ignore-vuln", known) == expected
    assert audit(tmp_path, "sound==1.0\n", osv) == NOTHING_FOUND


def test_unavailable_source_fails_the_audit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The exit code and the last line report that nothing was checked."""
    assert audit(tmp_path, "sound==1.0\n", f"http://127.0.0.1:{free_port()}/v1/query") == NOT_CHECKED
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "audit: OSV (api.osv.dev) could not be reached: " in printed.err
    assert printed.err.endswith("audit: nothing was checked: no source of advisories answered\n")


def test_skipped_package_is_not_counted_as_checked(capsys: pytest.CaptureFixture[str]) -> None:
    """For such a package, pip-audit itself prints "No known vulnerabilities found"."""
    skipped = {"name": "unheard-of", "skip_reason": "Dependency not found on PyPI"}
    assert judge({"dependencies": [skipped, {"name": "sound", "version": "1.0", "vulns": []}]}, "OSV") == NOT_CHECKED
    assert capsys.readouterr().out == (
        "audit: 1 packages are unknown to OSV: unheard-of\naudit: 1 packages checked against OSV: 0 findings\n"
    )
    assert judge({"dependencies": [skipped]}, "OSV") is None
    assert capsys.readouterr().err == "audit: OSV knows none of 1 packages\n"
