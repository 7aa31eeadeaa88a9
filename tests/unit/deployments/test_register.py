"""Tests of the registration: the user's edits that are restored, and the TLS contexts that clients share."""

import ssl
from typing import Any

import httpx
import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import DeploymentUpdate
from prefect.client.schemas.responses import DeploymentResponse
from prefect.exceptions import PrefectHTTPStatusError

from deployments.register import DeploymentSettings, restore_edits, shared_tls_contexts

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


def test_clients_share_one_tls_context_in_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts that their creators change are not shared, and afterwards each client has its own again."""
    read: list[object] = []
    original = ssl.create_default_context
    monkeypatch.setattr(ssl, "create_default_context", lambda **named: read.append(named) or original(**named))
    with shared_tls_contexts():
        for _ in range(3):
            SyncPrefectClient("http://127.0.0.1:4200/api")
        assert len(read) == 1
        assert ssl.create_default_context() is not ssl.create_default_context()
    read.clear()
    for _ in range(2):
        SyncPrefectClient("http://127.0.0.1:4200/api")
    assert len(read) == 2
