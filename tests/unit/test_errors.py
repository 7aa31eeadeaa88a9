"""Messages of invalid settings."""

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from tasks.config.etl import EtlConfig
from tasks.config.pipeline import PipelineConfig
from tasks.errors import WrongInput, explain, join_names


def sentence(model: type[BaseModel], values: dict[str, Any]) -> str:
    """Return the explanation of why the values are refused."""
    with pytest.raises(ValidationError) as refused:
        model.model_validate(values)
    return explain(refused.value)


def test_value_out_of_bounds_is_named_with_its_bound() -> None:
    """The message has the field, its value, and the bound."""
    assert sentence(EtlConfig, {"stored_side": 8}) == "stored_side is 8: input should be greater than or equal to 16"


def test_field_of_a_stage_is_named_by_its_path() -> None:
    """In the configuration of the DAG, a field is prefixed with its stage, as on the command line."""
    explained = sentence(PipelineConfig, {"train": {"device": "gpu"}})

    assert explained == "train.device is 'gpu': input should be 'auto', 'cpu' or 'cuda'"


def test_unknown_setting_is_named_with_the_way_out() -> None:
    """A misspelled name is not silently ignored, and the message says what to do."""
    assert sentence(EtlConfig, {"sorce": "/x"}) == "sorce is not a setting: did you mean source?"
    assert sentence(EtlConfig, {"x": 1}) == "x is not a setting: remove it or check its spelling"
    assert sentence(PipelineConfig, {"sorce": "/x"}) == "sorce is not a setting: did you mean source?"
    batch = sentence(PipelineConfig, {"train": {"batchsize": 8}})
    assert batch == "train: batchsize is not a setting: did you mean batch_size?"


def test_message_of_a_rule_across_fields_is_unchanged() -> None:
    """The message of our own validator has neither pydantic's prefix nor a field name before it."""
    explained = sentence(EtlConfig, {"val_fraction": 0.5, "test_fraction": 0.5})

    assert explained.startswith("val_fraction 0.5 and test_fraction 0.5 leave nothing to train on: ")


def test_rule_across_fields_of_a_stage_names_the_stage() -> None:
    """In the configuration of the DAG, the message is prefixed with the stage."""
    explained = sentence(PipelineConfig, {"train": {"weights": "none", "freeze_backbone": True}})

    assert explained.startswith("train: freeze_backbone is true with weights 'none'")


def test_missing_field_is_named() -> None:
    """A required setting that was not given is reported as missing."""

    class Needy(BaseModel):
        run_id: str

    explained = sentence(Needy, {})

    assert explained == "run_id is missing: give it a value"


def test_all_errors_are_reported_at_once() -> None:
    """Two invalid settings are two parts of one line."""
    explained = sentence(PipelineConfig, {"etl": {"stored_side": 8}, "cache": {"image_size": 8}})

    assert explained.split("; ") == [
        "etl.stored_side is 8: input should be greater than or equal to 16",
        "cache.image_size is 8: input should be greater than or equal to 16",
    ]
    assert "\n" not in explained


def test_wrong_input_is_a_value_error() -> None:
    """Callers that do not know WrongInput can catch it as a ValueError."""
    assert issubclass(WrongInput, ValueError)


@pytest.mark.parametrize(("total", "expected"), [(2, "a, b"), (3, "a, b and 1 more"), (9, "a, b and 7 more")])
def test_list_of_names_ends_with_the_number_of_the_others(total: int, expected: str) -> None:
    """The number of names that are not listed is appended if it is not zero."""
    assert join_names(["a", "b"], total) == expected
