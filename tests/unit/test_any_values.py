"""Property tests: any input gives a valid model or a ValidationError with a one-line explanation."""

import unicodedata
from collections import Counter
from collections.abc import Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tasks.config.frozen import FrozenConfig
from tasks.errors import explain
from tests.builders.settings_models import all_models

MODELS = [model for model in all_models() if model.model_fields]

NASTY_TEXT = st.sampled_from(
    [
        "",
        "\x00",
        "a\x00b",
        "\x1b[31m",
        "a\nb",
        "\u202e",
        "\ud800",
        "\udcff/x",
        "it's",
        '"',
        "..",
        "::",
        "//",
        "://",
        "http://[",
        "http://[::1",
        "file://",
        "file://h/x",
        "s3a://K:SECRET@b",
        "zip://a.csv::http://h/x.csv",
        "http://h/x.csv",
        "https://h/%zz.csv",
        "x.csv",
        "x" * 5000,
        "(" * 5000 + ")" * 5000,
        "(a{99999999999})",
        "(x{1000}){1000}",
        "(a+)+$",
        "(\\",
        "([\\W",
        "(?P<label>a)",
        "0g",
        "99999999999999999999t",
        "٣g",
        "1" * 5000,
        "1e999",
        "nan",
        "-inf",
        "local[0]",
        "local[999999999999]",
        "spark://",
        "k8s://",
        "folder",
        "pattern",
        "file",
        "auto",
        "none",
        "DEFAULT",
        "cosine",
        "one_cycle",
        "plateau",
        "true",
    ]
)
NUMBERS = st.one_of(
    st.integers(),
    st.sampled_from([0, 1, -1, 2, 10**12, 10**30, 10**400, -(10**400), 2**31, 2**53, 2**63, 2**64]),
    st.just(5000).map(lambda digits: 10**digits),  # Python refuses to write it
    st.floats(),
    st.sampled_from([0.1, 0.5, 1e308, 5e-324, float("nan"), float("inf"), float("-inf"), -0.0]),
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, NASTY_TEXT, st.text(max_size=8))
NAMES = st.one_of(NASTY_TEXT, st.text(max_size=4), st.sampled_from(["low", "high", "choices", "learning_rate", "conf"]))
JUNK = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(NAMES, inner, max_size=3)),
    max_leaves=5,
)
ORDINARY_TEXT = st.sampled_from(
    [
        "a",
        "a/b",
        "/data/x",
        "DEFAULT",
        "none",
        "champion",
        "local[2]",
        "yarn",
        "3g",
        "(a)",
        "x.csv",
        "größe",
        "learning_rate",
    ]
)


def plausible(annotation: Any, bounds: Sequence[Any] = ()) -> st.SearchStrategy[Any]:
    """Return a strategy of plausible values for a field of this type."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        made = plausible(inner[0], [*bounds, *inner[1:]])
    elif origin in (Union, UnionType):
        made = st.one_of(*(plausible(each, bounds) for each in inner))
    elif origin is Literal:
        made = st.sampled_from(inner)
    elif origin is list:
        made = st.lists(plausible(inner[0]), max_size=2)
    elif origin is dict:
        made = st.dictionaries(ORDINARY_TEXT, plausible(inner[1]), max_size=2)
    elif isinstance(annotation, type) and issubclass(annotation, FrozenConfig):
        made = values_of(annotation)
    elif annotation in (int, float):
        made = numbers(annotation, [part for bound in bounds for part in getattr(bound, "metadata", [bound])])
    else:
        made = {bool: st.booleans(), NoneType: st.none()}.get(annotation, ORDINARY_TEXT)
    return made


def numbers(kind: type, bounds: Sequence[Any]) -> st.SearchStrategy[Any]:
    """Return a strategy of numbers within the bounds of a field, inclusive."""
    low = max((getattr(bound, "ge", getattr(bound, "gt", -9)) for bound in bounds), default=-9)
    high = min((getattr(bound, "le", getattr(bound, "lt", 9e9)) for bound in bounds), default=9e9)
    return st.integers(int(low), int(high)) if kind is int else st.floats(low, high)


def values_of(model: type[FrozenConfig]) -> st.SearchStrategy[dict[str, Any]]:
    """Return a strategy of inputs from a form: some settings, most of them plausible, rarely an unknown name."""
    fields = {
        name: st.one_of(values := plausible(field.annotation, field.metadata), values, values, JUNK)
        for name, field in model.model_fields.items()
    }
    few = st.lists(st.sampled_from(list(fields)), max_size=3, unique=True)
    chosen = few.flatmap(lambda names: st.fixed_dictionaries({name: fields[name] for name in names}))
    return st.one_of(chosen, chosen, chosen, st.dictionaries(NAMES, JUNK, max_size=1))


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_any_values_are_valid_or_refused(model: type[FrozenConfig]) -> None:
    """No other exception is raised, an explanation is one printable line, and a valid model survives JSON."""
    seen: Counter[bool] = Counter()

    @settings(max_examples=120, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.one_of(values_of(model), values_of(model), values_of(model), JUNK))
    def check(values: Any) -> None:
        try:
            made = model.model_validate(values)
        except ValidationError as error:
            seen[False] += 1
            line = explain(error)
            assert line
            assert [mark for mark in line if unicodedata.category(mark) in {"Cc", "Cs", "Zl", "Zp"}] == []
            assert "SECRET" not in line
            line.encode()
        else:
            seen[True] += 1
            assert model.model_validate(made.model_dump(mode="json")) == made
            assert model.model_validate_json(made.model_dump_json()) == made

    check()
    assert min(seen[True], seen[False]) > 0, "both valid and invalid values are tried"
