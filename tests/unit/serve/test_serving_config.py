"""The parameters of a service: combinations that cannot be right are refused before anything starts."""

from typing import Any

import pytest
from pydantic import ValidationError

from tasks.config.serving import ServeConfig, ServeRun
from tasks.environment import API_KEY
from tasks.errors import WrongInput, explain
from tasks.serve.service import check_settings
from tasks.storage import Storage


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"max_images": 300}, "max_images is 300, more than max_waiting 256: raise max_waiting"),
        ({"log_requests": False, "keep_images": True}, "keep_images is set, and log_requests is false"),
        ({"log_requests": False, "challenger": "shadow"}, "challenger is set, and log_requests is false"),
        ({"port": 70_000}, "port is 70000"),
        ({"challenger": "yes"}, "challenger is 'yes'"),
        ({"challenger_share": 1.5}, "challenger_share is 1.5"),
    ],
)
def test_wrong_settings_are_refused(given: dict[str, Any], sentence: str) -> None:
    """With value and way out."""
    with pytest.raises(ValidationError) as refused:
        ServeConfig.model_validate(given)

    assert sentence in explain(refused.value)


def test_settings_of_inference_that_a_service_does_not_use_are_refused() -> None:
    """They would be ignored in silence."""
    with pytest.raises(ValueError, match="predict.source is set, but the service predicts the images of requests"):
        ServeRun.model_validate({"predict": {"source": "/photos"}})
    assert ServeRun.model_validate({"top_k": 3, "unknown_rate": 0.05}).predict.top_k == 3


@pytest.mark.parametrize(
    ("host", "is_local"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),  # noqa: S104  # not bound
        ("10.0.0.7", False),
        ("photos", False),
    ],
)
def test_a_service_for_other_machines_needs_a_key(
    host: str, is_local: bool, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its address decides."""
    run = ServeRun.model_validate({"host": host})
    monkeypatch.delenv(API_KEY, raising=False)
    assert run.serve.is_local == is_local
    if is_local:
        check_settings(run, storage)
        return
    with pytest.raises(WrongInput, match=f"serve.host is '{host}', which other machines can reach, and {API_KEY} is"):
        check_settings(run, storage)
    monkeypatch.setenv(API_KEY, "key")
    check_settings(run, storage)
