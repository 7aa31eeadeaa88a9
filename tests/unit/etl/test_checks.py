"""Reports and metrics of data validation; the measurement itself is tested on real tables."""

import pytest

from tasks.etl.validate import DataChecks
from tasks.refs import TableRef

CHECKS = DataChecks(
    images=TableRef(path="/tables/images", version=3),
    files=TableRef(path="/tables/files", version=4),
    classes={"cat": {"train": 6, "test": 2}, "dog": {"train": 1, "val": 1}},
    outcomes={"stored": 10, "duplicate": 4, "quarantined": 2},
    reasons={"truncated": 1, "zero_bytes": 1},
    widths={"min": 1, "median": 5, "max": 9},
    heights={"min": 2, "median": 6, "max": 8},
    leaked=0,
    near_duplicates=7,
    near_duplicates_complete=True,
    near_duplicate_bits=3,
    nearest=[],
    quarantined=[],
)


def row(checks: DataChecks, name: str) -> tuple[str, str]:
    """Return value and detail of one check."""
    return next((found["value"], found["detail"]) for found in checks.rows() if found["check"] == name)


def test_every_check_is_a_row_of_the_report() -> None:
    """Each row has the value of the check and a detail, such as the reasons of quarantined files."""
    assert row(CHECKS, "images") == ("10", "train 7, val 1, test 2")
    assert row(CHECKS, "classes") == ("2", "smallest dog 2, largest cat 8")
    assert row(CHECKS, "imbalance ratio") == ("4.00", "largest class / smallest class")
    assert row(CHECKS, "width in pixels") == ("5", "min 1, median 5, max 9")
    assert row(CHECKS, "quarantined") == ("12.50%", "truncated 1, zero_bytes 1")
    assert row(CHECKS, "duplicates")[0] == "4"
    assert row(CHECKS, "leaked")[0] == "0"
    assert row(CHECKS, "near-duplicates") == ("7", "pairs in different splits, at most 3 of 64 bits apart")


def test_incomplete_count_is_reported_as_a_lower_bound() -> None:
    """A count of near-duplicates that was cut short is shown with "at least"."""
    partial = CHECKS.model_copy(update={"near_duplicates_complete": False})

    assert row(partial, "near-duplicates")[0] == "at least 7"


def test_metrics_equal_the_values_of_the_report() -> None:
    """The tracking server gets the same values as the report."""
    assert CHECKS.metrics() == {
        "images": 10,
        "classes": 2,
        "imbalance_ratio": 4.0,
        "quarantined_fraction": pytest.approx(0.125),
        "duplicates": 4,
        "leaked": 0,
        "near_duplicates": 7,
    }


def test_empty_table_has_metrics() -> None:
    """Ratios of an empty table do not divide by zero."""
    empty = CHECKS.model_copy(update={"classes": {}, "outcomes": {}, "reasons": {}, "widths": {}, "heights": {}})

    assert (empty.imbalance_ratio, empty.quarantined_fraction) == (1.0, 0.0)
    assert row(empty, "quarantined") == ("0.00%", "none")


def test_checks_survive_a_json_round_trip() -> None:
    """Checks that were logged for a version are equal after they are loaded."""
    assert DataChecks.model_validate(CHECKS.model_dump(mode="json")) == CHECKS
