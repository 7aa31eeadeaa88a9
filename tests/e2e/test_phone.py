"""A folder as phones leave it: two commands of the README lead to a CSV file of predictions and the page of results."""

import csv
import json
import os
import re
from pathlib import Path

import pytest

from tasks.system.listening import free_port
from tests.builders.chromium import chromium, open_summary, text_of
from tests.builders.phone_folder import IGNORED, LEFT_BY_SYSTEMS, PER_CLASS, write_phone_folder
from tests.builders.processes import plain_environment, run_printed, run_python
from tests.builders.stack import running_up


@pytest.mark.long
@pytest.mark.skipif(not os.environ.get("LAKEVISION_TEST_DATA"), reason="LAKEVISION_TEST_DATA has no weights")
@pytest.mark.timeout(1500)
def test_phone_folder_goes_to_predictions_with_two_commands(tmp_path: Path) -> None:
    """No setting is given; every file is accounted for, and the second command is filled in by the first."""
    folder, home = write_phone_folder(tmp_path / "phone"), tmp_path / "home"
    weights = Path(os.environ["LAKEVISION_TEST_DATA"]).resolve() / "weights/mobilenet_v2.pth"
    downloaded = tmp_path / "torch/hub/checkpoints/mobilenet_v2-7ebf99e0.pth"  # where a download would put them
    downloaded.parent.mkdir(parents=True)
    downloaded.symlink_to(weights)
    torch_home = str(tmp_path / "torch")
    environment = plain_environment(LAKEVISION_HOME=str(home), LAKEVISION_PORT=str(free_port()), TORCH_HOME=torch_home)

    first = run_python("-m", "deployments.demo", "--source", str(folder), environment=environment, timeout=1200)

    assert first.returncode == 0, first.stdout[-4000:] + first.stderr[-4000:]
    summary = json.loads((home / "summary.json").read_text())
    assert (summary["images"], summary["quarantined"], summary["ignored"]) == (2 * PER_CLASS, 0, len(IGNORED))
    num_files = sum(1 for path in folder.rglob("*") if path.is_file())
    assert re.search(
        rf"{num_files} files = {2 * PER_CLASS} stored \+ 0 duplicates \+ 0 quarantined \+ {len(IGNORED)} ignored "
        rf"\(2 \.mov, 1 \.aae, 1 \.txt\) \+ {len(LEFT_BY_SYSTEMS)} left by systems",
        first.stdout,
    )
    assert (summary["predictions"], summary["prediction_errors"]) == (2 * PER_CLASS, 0)
    before, after, why = (
        next(line for line in first.stdout.splitlines() if line.startswith(name))
        for name in ("verdict", "champion", "why")
    )
    assert "expected test accuracy" in before
    assert "test accuracy" in after
    assert re.search(r"'(head|all layers), weight decay .*' is the best by val_calibrated_loss \(val accuracy", why)
    assert "; fine-tuning: " in why
    assert re.search(r"Prefect UI  http://[^/]+/runs/flow-run/\S+", first.stdout)
    command = summary["next"]["predict a folder"]
    assert command in first.stdout

    second = run_printed(command.replace("FOLDER", str(folder)), timeout=600)

    assert second.returncode == 0, second.stderr
    report = json.loads(second.stdout)
    assert (report["num_files"], report["num_failed"], report["num_ignored"]) == (2 * PER_CLASS, 0, len(IGNORED))
    with open(report["csv"], encoding="utf-8-sig", newline="") as file:
        rows = {row["path"]: row for row in csv.DictReader(file)}
    assert set(rows) == {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} - {
        *IGNORED,
        *LEFT_BY_SYSTEMS,
    }
    assert {row["predicted"] for row in rows.values()} <= {"beach", "forest"}
    assert f"{2 * PER_CLASS} files, 0 of them failed, {len(IGNORED)} other files ignored" in second.stderr

    (path,) = re.findall(r"Prefect UI  http://[^/]+(/runs/flow-run/\S+)", first.stdout)
    with running_up(home) as up, chromium() as page:
        assert open_summary(page, up.url, path, up.auth).rect["y"] < 2 * 900
        shown = text_of(page)
        assert command in shown
        assert f"{2 * PER_CLASS} ingested, 0 quarantined" in shown
