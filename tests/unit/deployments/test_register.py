"""Tests of the registration: the user's edits of deployments, which it keeps on disk and restores."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from prefect.client.schemas.actions import DeploymentUpdate
from prefect.client.schemas.responses import DeploymentResponse
from prefect.exceptions import PrefectHTTPStatusError

from deployments.stack.register import DeploymentSettings, before_interruption, keep, kept, restore_edits

PHOTOS, DIGITS, FOREIGN = (f"{number}" * 8 + f"-{number * 4}" * 3 + "-" + f"{number}" * 12 for number in "123")
HOURLY, NIGHTLY = ({"cron": cron, "timezone": "UTC"} for cron in ("0 * * * *", "0 5 * * *"))


class Server:
    """A server that refuses the parameters of one deployment, as after a change of their schema."""

    def __init__(self) -> None:
        self.updated: dict[str, Any] = {}
        self.active: dict[str, bool] = {}

    def read_deployments(self) -> list[DeploymentResponse]:
        """Return two deployments, with a schedule each, and another project's deployment with the name of one."""
        return [
            DeploymentResponse.model_validate(
                {
                    "id": key,
                    "name": name,
                    "flow_id": key,
                    "entrypoint": entrypoint,
                    "schedules": [{"id": key, "slug": "daily", "schedule": HOURLY, "active": False}],
                }
            )
            for key, name, entrypoint in (
                (PHOTOS, "photos", "flows.pipeline.pipeline"),
                (DIGITS, "pipeline", "flows.pipeline.pipeline"),
                (FOREIGN, "pipeline", "mine.py:pipeline"),
            )
        ]

    def update_deployment_schedule(self, deployment: object, entry: object, *, active: bool, **_others: Any) -> None:
        """Note whether the schedule is active."""
        self.active[str(deployment)] = active

    def update_deployment(self, deployment: object, update: DeploymentUpdate) -> None:
        """Accept or refuse parameters."""
        if str(deployment) == PHOTOS:
            request = httpx.Request("PATCH", "http://127.0.0.1/api/deployments")
            refused = httpx.Response(409, request=request, json={"detail": "None is not of type 'integer'"})
            raise PrefectHTTPStatusError("refused", request=request, response=refused)
        self.updated[str(deployment)] = update.parameters


def test_edit_that_is_no_longer_valid_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    """The edits of the other deployments are restored all the same.

    An active schedule is paused where the edited parameters cannot be restored: it would run those of the file.
    """
    server, edited = Server(), {"config": {"cache": {"keep_days": None}}}
    settings = {"schedules": {"daily": HOURLY}, "active": {"daily": True}}
    before = {
        name: DeploymentSettings.model_validate(settings | {"parameters": edited}) for name in ("photos", "pipeline")
    }
    given = {name: DeploymentSettings.model_validate(settings | {"parameters": {}}) for name in ("photos", "pipeline")}

    restore_edits(server, before, given)  # type: ignore[arg-type]  # a fake with the methods that are called

    assert server.updated == {DIGITS: edited}
    assert server.active == {DIGITS: True}
    printed = capsys.readouterr().out
    assert "the edited parameters of 'photos' could not be restored" in printed
    assert 'Its schedules are paused. The value was {"config": {"cache": {"keep_days": null}}}' in printed


def test_settings_without_a_record_count_as_edited() -> None:
    """The record may be of another machine, or lost: the settings on the server stay."""
    server, edited = Server(), {"config": {"source": "/data/mine"}}
    before = {"pipeline": DeploymentSettings.model_validate({"parameters": edited, "active": {}, "schedules": {}})}

    restore_edits(server, before, {})  # type: ignore[arg-type]  # a fake with the methods that are called

    assert server.updated == {DIGITS: edited}


def test_edits_before_and_after_an_interrupted_registration_are_both_kept() -> None:
    """A setting that it had reset has the value from before; a later edit of a user counts more."""
    file = {"parameters": {"digits": 1}, "tags": ["dag"], "schedules": {"daily": HOURLY}, "active": {"daily": False}}
    edited = file | {"parameters": {"mine": 1}, "schedules": {"daily": NIGHTLY}, "active": {"daily": True}}
    reset_and_edited_since = file | {"tags": ["dag", "mine"]}
    given, before, now = map(DeploymentSettings.model_validate, (file, edited, reset_and_edited_since))

    found = before_interruption(now, before, [given, given])

    assert found == DeploymentSettings.model_validate(edited | {"tags": ["dag", "mine"]})
    # Restored before the end, and edited again.
    again = DeploymentSettings.model_validate(edited | {"parameters": {"mine": 2}})
    assert before_interruption(again, before, [given, given]) == again


def test_record_is_written_in_one_step_and_a_cut_one_of_an_older_release_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A process that is killed while it writes leaves the former record, and no stack is kept from its start."""
    record = tmp_path / "prefect" / "deployed.json"
    settings = {"pipeline": DeploymentSettings(parameters={"a": 1}, schedules={}, active={})}
    keep(record, settings)
    assert kept(record) == settings
    assert kept(record)["pipeline"].model_fields_set == {"parameters", "schedules", "active"}
    assert [file.name for file in record.parent.iterdir()] == ["deployed.json"]
    record.write_bytes(record.read_bytes()[:20])
    assert kept(record) == {}
    assert f"'{record}' is damaged" in capsys.readouterr().out
