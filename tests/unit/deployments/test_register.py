"""What a person edited of a deployment, brought back after it was deployed anew."""

from typing import Any

import httpx
import pytest
from prefect.client.schemas.actions import DeploymentUpdate
from prefect.client.schemas.responses import DeploymentResponse
from prefect.exceptions import PrefectHTTPStatusError

from deployments.register import DeploymentSettings, restore_edits

PHOTOS, DIGITS = "11111111-1111-1111-1111-111111111111", "22222222-2222-2222-2222-222222222222"


class Server:
    """A server that refuses the parameters of one deployment, as it does where their schema has changed."""

    def __init__(self) -> None:
        self.taken: dict[str, Any] = {}

    def read_deployments(self) -> list[DeploymentResponse]:
        """Return two deployments."""
        return [
            DeploymentResponse.model_validate({"id": key, "name": name, "flow_id": key})
            for key, name in ((PHOTOS, "photos"), (DIGITS, "pipeline"))
        ]

    def update_deployment(self, deployment: object, update: DeploymentUpdate) -> None:
        """Take or refuse parameters."""
        if str(deployment) == PHOTOS:
            request = httpx.Request("PATCH", "http://127.0.0.1/api/deployments")
            refused = httpx.Response(409, request=request, json={"detail": "None is not of type 'integer'"})
            raise PrefectHTTPStatusError("refused", request=request, response=refused)
        self.taken[str(deployment)] = update.parameters


def test_an_edit_that_no_longer_fits_is_told_and_ends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """The stack starts, and the other deployments have what was edited."""
    server, edited = Server(), {"config": {"cache": {"keep_days": None}}}
    names = ("photos", "pipeline")
    before = {name: DeploymentSettings(parameters=edited, schedules={}, active={}) for name in names}
    given = {name: DeploymentSettings(parameters={}, schedules={}, active={}) for name in names}

    restore_edits(server, before, given)  # type: ignore[arg-type]  # what it asks of a client

    assert server.taken == {DIGITS: edited}
    assert "the edited parameters of 'photos' are not taken over" in capsys.readouterr().out
