"""Rows of the table `promotions`: which decisions are one and the same."""

from tasks.refs import ModelRef, RunRef
from tasks.registry.decision import Promotion
from tasks.registry.history import row_of_promotion

CHAMPION = ModelRef(name="photos", version=3, run_id="a" * 32)


def kept(reason: str, approved_by: str | None = None) -> str:
    """Return the id of a decision for the champion, with this reason."""
    decision = Promotion(
        champion=CHAMPION,
        outcome="kept",
        challenger=RunRef(run_id="b" * 32),
        challenger_accuracy=0.9,
        champion_accuracy=0.8,
        challenger_images=10,
        champion_images=10,
        reason=reason,
        previous=CHAMPION,
        approved_by=approved_by,
    )
    return row_of_promotion(decision, None).decision_id


def test_repeated_decision_has_one_id_although_times_are_measured_again() -> None:
    """An image takes another time in each run; a figure of the test images is the same."""
    slow = "an image takes {} ms, {} times the champion's {} ms and more than promote.max_latency_ratio 2.0"
    assert kept(slow.format("30.0", "3.00", "10.0")) == kept(slow.format("31.2", "2.84", "11.0"))
    assert kept("0.9000 of 10 test images") != kept("0.8000 of 10 test images")
    assert kept("0.9000 of 10 test images") != kept("0.9000 of 10 test images", "reviewer")
