"""Tests of the registration: the user's edits that are restored, and the TLS contexts that clients share."""

from typing import Any

import httpx
import pytest
from prefect.client.schemas.actions import DeploymentUpdate
from prefect.client.schemas.responses import DeploymentResponse
from prefect.exceptions import PrefectHTTPStatusError

from deployments.stack.register import DeploymentSettings, restore_edits

PHOTOS, DIGITS = "11111111-1111-1111-1111-111111111111", "22222222-2222-2222-2222-222222222222"


class Server:
    """A server that refuses the parameters of one deployment, as after a change of their schema."""

    def __init__(self) -> None:
        self.updated: dict[str, Any] = {}

    def read_deployments(self) -> list[DeploymentResponse]:
        """Return two deployments."""
        return [
            DeploymentResponse.model_validate({"id": key, "name": name, "flow_id": key})
            for key, name in ((PHOTOS, "photos"), (DIGITS, "pipeline"))
        ]

    def update_deployment(self, deployment: object, update: DeploymentUpdate) -> None:
        """Accept or refuse parameters."""
        if str(deployment) == PHOTOS:
            request = httpx.Request("PATCH", "http://127.0.0.1/api/deployments")
            refused = httpx.Response(409, request=request, json={"detail": "None is not of type 'integer'"})
            raise PrefectHTTPStatusError("refused", request=request, response=refused)
        self.updated[str(deployment)] = update.parameters


def test_edit_that_is_no_longer_valid_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    """The edits of the other deployments are restored all the same."""
    server, edited = Server(), {"config": {"cache": {"keep_days": None}}}
    names = ("photos", "pipeline")
    before = {name: DeploymentSettings(parameters=edited, schedules={}, active={}) for name in names}
    given = {name: DeploymentSettings(parameters={}, schedules={}, active={}) for name in names}

    restore_edits(server, before, given)  # type: ignore[arg-type]  # a fake with the methods that are called

    assert server.updated == {DIGITS: edited}
    assert "the edited parameters of 'photos' could not be restored" in capsys.readouterr().out
