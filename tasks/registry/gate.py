"""The promotion gate: which run is the best, and whether it beats the champion, as pure decisions."""

from collections.abc import Sequence

from tasks.config.promotion import PromoteConfig
from tasks.errors import WrongInput, join_names
from tasks.registry.comparison import chance_gain, loss_p_value
from tasks.registry.decision import ClassComparison, Comparison
from tasks.text.forms import composed
from tasks.tracking.evaluated import EvaluatedRun

NUM_NAMED = 5

ROUNDING = 1e-6
"""Accuracies that differ by at most this are equal: training runs record float32 values, which round 1/3."""

LOSS_LEVEL = 0.05
"""Level of the test for a loss of a class with few images. It is not corrected for the number of classes: that a
champion stays costs less than a class that is lost."""

FEWEST_IMAGES = 5
"""Images of a class from which on a loss can be proven at LOSS_LEVEL: if all 5 are lost, the p-value is 1/32."""


def choose_best(candidates: Sequence[EvaluatedRun]) -> EvaluatedRun:
    """Return the run with the highest accuracy on the split `val`, of equal runs the first.

    The split `test` takes no part in the choice: the highest of many test accuracies would be too high an estimate for
    new images.

    Args:
        candidates: The runs, at least one.

    Raises:
        WrongInput: One of several runs has no accuracy on `val`.
    """
    unknown = [found.run.run_id for found in candidates if found.val_accuracy is None]
    if unknown and len(candidates) > 1:
        raise WrongInput(
            f"MLflow run '{unknown[0]}' has no metric best_val_accuracy, by which the best of {len(candidates)} runs "
            "is chosen",
            way_out="give finished runs of the flow train, or a single run",
        )
    return max(candidates, key=lambda found: found.val_accuracy or 0.0)


def check_minimums(best: EvaluatedRun, num_candidates: int, promote: PromoteConfig) -> None:
    """Check that a run reaches the minimums on the split `test`.

    Args:
        best: The run.
        num_candidates: Number of runs of which it is the best, for the message.
        promote: The minimums.

    Raises:
        WrongInput: It does not, or the value is not known.
    """
    for name, setting, value, minimum in (
        ("test accuracy", "min_test_accuracy", best.accuracy, promote.min_test_accuracy),
        ("test macro F1", "min_test_macro_f1", best.macro_f1, promote.min_test_macro_f1),
    ):
        if minimum and (value is None or value < minimum):
            known = "unknown" if value is None else f"{value:.4f}"
            raise WrongInput(
                f"the best of {num_candidates} runs has {name} {known}, below promote.{setting} {minimum}",
                setting=f"promote.{setting}",
                way_out="train a better model or lower that minimum; the champion is unchanged",
            )


def check_comparable(challenger: EvaluatedRun, champion: EvaluatedRun, name: str, *, is_given: bool) -> None:
    """Check that challenger and champion can be compared: models of different tables have different test images.

    Args:
        challenger: The challenger.
        champion: The champion.
        name: Name of the registered model.
        is_given: Whether the name is from `promote.model_name`; else it was derived from the table.

    Raises:
        WrongInput: The champion was trained on another table with other images.
    """
    if challenger.same_table(champion) or challenger.same_content(champion) or challenger.is_served_by(champion):
        return
    path = "" if champion.table is None else f" ('{champion.table.path}')"
    or_empty = ", or leave it empty for a name derived from the table" if is_given else ""
    raise WrongInput(
        f"the champion of the registered model '{name}' was trained on another table{path}, so the two cannot be "
        "compared",
        setting="promote.model_name",
        way_out=f"set promote.model_name to another name, such as '{name}-2'{or_empty}",
    )


def class_objections(challenger: Sequence[str], champion: Sequence[str], promote: PromoteConfig) -> list[str]:
    """Return the objection to a challenger that lacks classes of the champion, as in `objections`.

    The test images do not show it: without images of a class, a model that does not know it has the easier problem.

    Args:
        challenger: Classes of the challenger.
        champion: Classes of the champion.
        promote: The limits.
    """
    known = {composed(name) for name in challenger}
    gone = [f"'{name}'" for name in sorted(champion) if composed(name) not in known]
    if not gone or promote.allow_fewer_classes:
        return []
    plural = "class" if len(gone) == 1 else "classes"
    return [
        f"it has no {plural} {join_names(gone[:NUM_NAMED], len(gone))}, which the champion has (set "
        "promote.allow_fewer_classes if that is wanted, as after a class was renamed)"
    ]


def is_better(challenger: float, champion: float, min_gain: float = 0.0) -> bool:
    """Return whether a challenger's accuracy exceeds the champion's by more than `min_gain` and ROUNDING."""
    return challenger - champion > min_gain + ROUNDING


def objections(comparison: Comparison, promote: PromoteConfig) -> list[str]:
    """Return why a challenger must not replace the champion, one part of a sentence for each limit; none if it may.

    Args:
        comparison: Figures of both on the same images.
        promote: The limits.
    """
    found = gain_objections(
        comparison.challenger_accuracy,
        comparison.champion_accuracy,
        comparison.only_challenger + comparison.only_champion,
        comparison.images,
        comparison.num_judged,
        promote,
    )
    fallen = [
        f"'{one.label}' from {one.champion:.4f} to {one.challenger:.4f}"
        for one in comparison.classes
        if _falls(one, promote) and (one.images >= promote.min_class_images or _is_proven(one))
    ]
    if fallen:
        found.append(
            f"the recall of {join_names(fallen[:NUM_NAMED], len(fallen))} falls by more than promote.max_recall_drop "
            f"{promote.max_recall_drop}"
        )
    # Bonferroni's correction, as in `chance_gain`.
    if promote.max_p_value < 1 and comparison.p_value * comparison.num_judged > promote.max_p_value:
        times = f" times {comparison.num_judged} challengers" if comparison.num_judged > 1 else ""
        found.append(
            f"the p-value {comparison.p_value:.3g} of McNemar's exact test{times} is above promote.max_p_value "
            f"{promote.max_p_value}"
        )
    ours, theirs = comparison.challenger_milliseconds, comparison.champion_milliseconds
    limit = promote.max_latency_ratio
    if limit is not None and ours is not None and theirs is not None and ours > limit * theirs:
        found.append(
            f"an image takes {ours:.1f} ms, {ours / theirs:.2f} times the champion's {theirs:.1f} ms and more than "
            f"promote.max_latency_ratio {limit}"
        )
    return found


def gain_objections(
    challenger: float, champion: float, differing: float, images: int, num_judged: int, promote: PromoteConfig
) -> list[str]:
    """Return the objection to a challenger that is not better, or whose gain may be chance, as in `objections`.

    Args:
        challenger: Accuracy of the challenger, 0-1.
        champion: Accuracy of the champion.
        differing: As for `chance_gain`.
        images: As for `chance_gain`.
        num_judged: As for `chance_gain`.
        promote: The limits.
    """
    least = promote.min_accuracy_gain
    if least <= -1:  # no limit
        return []
    if not is_better(challenger, champion, least):
        by = f" by more than promote.min_accuracy_gain {least}" if least else ""
        return [f"it is not better{by}"]
    chance = chance_gain(differing, images, num_judged)
    if is_better(challenger, champion, least + chance):
        return []
    limit = f"promote.min_accuracy_gain {least} plus {chance:.4f}" if least else f"{chance:.4f}"
    gain = f"{challenger - champion:.4f}"
    return [f"its gain of {gain} is not above {limit}, which may be chance after {num_judged} challengers"]


def _falls(one: ClassComparison, promote: PromoteConfig) -> bool:
    return one.champion - one.challenger > promote.max_recall_drop + ROUNDING


def _is_proven(one: ClassComparison) -> bool:
    return loss_p_value(one.only_champion, one.only_challenger) <= LOSS_LEVEL


def classes_not_judged(comparison: Comparison, promote: PromoteConfig) -> list[str]:
    """Return the classes whose recall `max_recall_drop` cannot judge, each with the number of its images.

    They have too few images for a loss to be proven, or fall by more than the limit, which may be chance.

    Args:
        comparison: Figures of both on the same images.
        promote: The limits.
    """
    if promote.max_recall_drop >= 1:
        return []
    few = [
        f"'{one.label}' ({one.images})"
        for one in comparison.classes
        if one.images < promote.min_class_images
        and (one.images < FEWEST_IMAGES or (_falls(one, promote) and not _is_proven(one)))
    ]
    return [*(f"'{label}' (0)" for label in comparison.unseen), *few]


def check_size(num_bytes: int, promote: PromoteConfig) -> None:
    """Check the size of a run's weights.

    Raises:
        WrongInput: They are larger than `promote.max_megabytes`.
    """
    if promote.max_megabytes is not None and num_bytes > promote.max_megabytes * 1e6:
        raise WrongInput(
            f"the weights of the best run have {num_bytes / 1e6:.1f} MB, more than promote.max_megabytes "
            f"{promote.max_megabytes}",
            setting="promote.max_megabytes",
            way_out="train a smaller network or raise that maximum; the champion is unchanged",
        )


def is_older(challenger: EvaluatedRun, champion: EvaluatedRun) -> bool:
    """Return whether the challenger was trained on an older version of the champion's table."""
    if challenger.table is None or champion.table is None or challenger.same_content(champion):
        return False
    return challenger.same_table(champion) and challenger.table.version < champion.table.version
