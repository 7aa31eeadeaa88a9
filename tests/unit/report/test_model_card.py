"""Tests of the model card: its values are those of the training run, and its command reproduces the settings."""

import re
import shlex
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from flows.command_line import parse_arguments
from tasks.cache.manifest import open_cache
from tasks.config.distributed import DistributedConfig, TrainDistributedRun
from tasks.config.recipe import FineTuningPlan
from tasks.config.train import TrainConfig, TrainRun
from tasks.model.pretrained import preprocessing
from tasks.refs import CacheRef
from tasks.report.model_card import TrainingFacts, model_card, why_chosen
from tasks.storage import Storage, resolve_storage
from tests.builders.finished_training import evaluation_of, facts_of, scores_of

COUNTS = [30, 40, 7]

STORAGE = Storage(
    home="/data/my home",
    tables="/data/my home/photos-tables",
    cache="/data/my home/cache",
    artifacts="/data/my home/artifacts",
    tracking="http://me:pw@mlflow",
)


@pytest.fixture
def cache(make_cache: Callable[..., CacheRef]) -> CacheRef:
    """Build a cache of three classes."""
    return make_cache({"train": 9, "val": 3, "test": 12})


def card_of(facts: TrainingFacts) -> str:
    """Return the card of a run with the id `run`, of the commit `abc`."""
    return model_card(facts, COUNTS, "run", "abc", STORAGE)


def rows_of(card: str, first: str) -> list[str]:
    """Return the cells of the table row that begins with `first`."""
    (found,) = re.findall(rf"^\| {re.escape(first)} \|.*\|$", card, flags=re.MULTILINE)
    return [cell.strip() for cell in found.strip("|").split("|")]


def test_results_are_those_of_the_best_epoch_and_of_the_split_test(cache: CacheRef) -> None:
    """Both have every common metric; with 8 of 12 images correct and a mean probability of 0.9 it is overconfident."""
    facts = facts_of(cache)
    card = card_of(facts)

    best = facts.history[1]
    assert rows_of(card, "loss") == ["loss", f"{best.val_loss:.4f}", "0.5000"]
    assert rows_of(card, "accuracy") == ["accuracy", f"{best.val_accuracy:.4f}", f"{8 / 12:.4f}"]
    assert rows_of(card, "macro f1") == ["macro f1", f"{best.val_macro_f1:.4f}", f"{facts.test.macro_f1:.4f}"]
    assert rows_of(card, "calibration error")[-1] == f"{0.9 - 8 / 12:.4f}"
    assert rows_of(card, "calibration error before")[-1] == f"{0.95 - 8 / 12:.4f}"
    interval = "with a 95 % confidence interval (Wilson) from 0.3906 to 0.8619."
    assert f"On 12 test images the accuracy is 0.6667, {interval}" in card
    assert "probability of the predicted classes is 0.9000: the model is overconfident by 0.2333" in card


def test_card_states_the_serving_form(cache: CacheRef) -> None:
    """The card has temperature and precision, and how far the predictions are from those in float32."""
    card = card_of(facts_of(cache))

    assert "are divided by the temperature 1.2500" in card
    assert "is served, in bfloat16; a device without instructions for it serves in float32. On 12 test images" in card
    assert "differ by 0.0020 in the mean and by 0.0100 at most between the two, and 1 labels differ." in card
    exact = card_of(facts_of(cache, precision="float32", difference=None))
    assert "The model was tested, and is served, in float32." in exact


def test_card_has_the_false_alarms_of_each_threshold(cache: CacheRef) -> None:
    """19 images of `val` have a threshold from the rate 0.05 on; of four test images one is above it."""
    card = card_of(facts_of(cache))

    assert "The thresholds were fitted on the 19 images of the split `val`." in card
    assert rows_of(card, "0.03") == ["0.03", "1.0000", "0.0000", "0.0000"]
    assert rows_of(card, "0.05") == ["0.05", "0.9000", "0.0000", "0.2500"]
    assert rows_of(card, "0.5") == ["0.5", "0.4500", "0.4737", "0.2500"]
    assert card.index("## Intended use and limits") < card.index("## Images of no class") < card.index("## Data")
    assert "so the model has no `unknown_score`." in card_of(facts_of(cache, scores=scores_of()))


def test_weakest_classes_come_first_with_their_images_and_confusions(cache: CacheRef) -> None:
    """The class cat, which is always predicted as ant, comes first."""
    card = card_of(facts_of(cache))

    assert rows_of(card, "cat") == ["cat", "7", "2", "0.0000", "0.0000", "0.0000"]
    assert rows_of(card, "ant") == ["ant", "30", "4", "0.5000", "0.7500", "0.6000"]
    assert card.index("| cat |") < card.index("| ant |") < card.index("| bee |")
    assert card.index("- cat predicted as ant: 2 of 2") < card.index("- ant predicted as bee: 1 of 4")


def test_perfect_model_has_no_weak_classes(cache: CacheRef) -> None:
    """Without a misclassified image, no confusion is listed either."""
    card = card_of(facts_of(cache, test=evaluation_of(torch.diag(torch.tensor([4, 6, 2])), ())))

    assert "No test image was misclassified." in card
    assert "predicted as" not in card
    assert "underconfident by 0.1000" in card


def test_limits_are_facts_of_the_data(cache: CacheRef) -> None:
    """The card names the rarest class, and the classes with few test images."""
    card = card_of(facts_of(cache))

    assert "It distinguishes these classes: ant, bee, cat." in card
    assert "The class with the fewest training images is cat (7), the class with the most is bee (40)." in card
    assert "fewer than 10 test images, whose metrics are therefore uncertain: ant (4), bee (6), cat (2)." in card
    many = facts_of(cache, test=evaluation_of(10 * evaluation_of().confusion_KK))
    assert "fewer than 10 test images" not in card_of(many)


def test_card_begins_with_the_interval_where_it_is_wide(cache: CacheRef) -> None:
    """So few test images say little; a thousand do, and the card has only the sentence after the table."""
    few = card_of(facts_of(cache))
    assert few.index("**The model was tested on few images (12):**") < few.index("| metric |")
    assert "on other images of this kind is between 0.39 and 0.86, with a confidence of 95 %" in few
    many = card_of(facts_of(cache, test=evaluation_of(100 * evaluation_of().confusion_KK)))
    assert "tested on few images" not in many


def test_lowered_batch_size_is_in_the_card(cache: CacheRef) -> None:
    """With its setting and the number of images; a batch size that fits has no row."""
    row = rows_of(card_of(facts_of(cache, train=TrainConfig(batch_size=32))), "batch size")
    assert row == ["batch size", "9, lowered from 32: the split `train` has 9 images"]
    assert "lowered from" not in card_of(facts_of(cache, train=TrainConfig(batch_size=9)))


def test_empty_test_split_is_reported_without_metrics(cache: CacheRef) -> None:
    """The card has neither a division by zero nor a NaN."""
    card = card_of(facts_of(cache, test=evaluation_of(torch.zeros((3, 3), dtype=torch.int64), ())))

    assert "The split `test` has no images: nothing was measured." in card
    assert "nan" not in card


def test_card_identifies_data_and_run(cache: CacheRef) -> None:
    """Table, version, digests, numbers of rows, run and commit are in the card."""
    facts = facts_of(cache, weights_digest="d" * 64)
    card = card_of(facts)

    for value in ("/tables/images", "content", cache.digest, "d" * 64, "run", "abc"):
        assert f"`{value}`" in card, value
    assert rows_of(card, "version") == ["version", "3"]
    assert rows_of(card, "images of the split test") == ["images of the split test", "12"]
    assert rows_of(card, "decoding") == ["decoding", "version 1"]
    assert rows_of(card, "best epoch")[1] == f"1, by val_calibrated_loss {facts.history[1].val_calibrated_loss:.4f}"
    assert "unknown: not a git checkout" in model_card(facts, COUNTS, "run", None, STORAGE)


@pytest.mark.parametrize(
    ("weights", "digest", "row"),
    [("DEFAULT", "mobilenet_v2-7ebf99e0.pth", "weights file"), ("/a/b.pth", "d" * 64, "weights sha256")],
)
def test_initial_weights_are_identified_by_their_content(cache: CacheRef, weights: str, digest: str, row: str) -> None:
    """The name of weights may later refer to other content."""
    card = card_of(facts_of(cache, train=TrainConfig(weights=weights), weights_digest=digest))
    assert rows_of(card, row) == [row, f"`{digest}`"]


def test_other_image_size_than_that_of_the_weights_is_in_the_card(cache: CacheRef) -> None:
    """A row says for what the initial weights were made; there is none where the sizes are equal."""
    made_for = preprocessing("efficientnet_b3", "DEFAULT")
    row = rows_of(card_of(facts_of(cache, other_size=made_for.difference(16))), "image size")
    assert row[1] == "16 pixels; the weights are made for images of 300 pixels (center crop of 0.938, bicubic)"
    assert "| image size |" not in card_of(facts_of(cache, other_size=""))


def test_only_settings_that_differ_from_the_defaults_are_shown(cache: CacheRef) -> None:
    """Each is shown with its value and its default."""
    card = card_of(facts_of(cache, train=TrainConfig(learning_rate=0.5)))

    assert rows_of(card, "`train.learning_rate`") == ["`train.learning_rate`", "`0.5`", "`None`"]
    assert rows_of(card, "`cache.image_size`") == ["`cache.image_size`", "`16`", "`224`"]
    assert "`train.batch_size`" not in card


def test_card_has_the_backend_of_ranks_and_its_reason(cache: CacheRef) -> None:
    """A single process has none."""
    settings = DistributedConfig(backend="torch")
    card = card_of(facts_of(cache, distributed=settings, backend_reason="Horovod was built without NCCL"))
    assert rows_of(card, "gradients averaged by") == ["gradients averaged by", "torch: Horovod was built without NCCL"]
    assert "gradients averaged by" not in card_of(facts_of(cache))


@pytest.mark.parametrize("distributed", [None, DistributedConfig(num_ranks=3, log_ranks="all")])
def test_command_has_the_settings_of_the_training_run(cache: CacheRef, distributed: DistributedConfig | None) -> None:
    """Parsed by the flow, the command gives the same settings, the same tables and the same version of the data."""
    train = TrainConfig(weights="/my weights/a'b.pth", max_gradient_norm=1.5, freeze_backbone=False, monitor="val_loss")
    card = card_of(facts_of(cache, train=train, distributed=distributed))

    (command,) = re.findall(r"```sh\n(.*)\n```", card)
    words = shlex.split(command)
    assert words[:3] == [".venv/bin/python", "-m", "flows.train" if distributed is None else "flows.train_distributed"]
    run = parse_arguments(TrainRun if distributed is None else TrainDistributedRun, "flow", words[3:])
    assert run.train == train
    assert run.table_version == 3
    assert resolve_storage(run.storage).tables == "/data/my home/photos-tables"
    assert "pw" not in command
    assert run.cache.decisive() == open_cache(cache).settings.decisive()
    if distributed is not None:
        assert run.distributed == distributed


def test_class_names_are_escaped_in_the_card(cache: CacheRef) -> None:
    """A pipe does not end a table cell, and HTML tags and Markdown have no effect."""
    manifest = open_cache(cache).model_copy(update={"classes": ("a|b", "<img src=x>", "*c*\n# _d_ e_f")})
    card = card_of(facts_of(cache, manifest=manifest))

    assert r"a\|b" in card
    assert r"\<img src=x\>" in card
    assert r"\*c\* \# \_d\_ e_f" in card
    lines = [line for line in card.splitlines() if line.startswith(r"| a\|b")]
    assert [line.replace(r"\|", "").count("|") for line in lines] == [7]


def test_only_the_first_of_many_classes_are_listed(cache: CacheRef) -> None:
    """The number of the remaining classes is given."""
    classes = tuple(f"class-{index:03d}" for index in range(200))
    manifest = open_cache(cache).model_copy(update={"classes": classes})
    facts = facts_of(cache, manifest=manifest, test=evaluation_of(torch.eye(200, dtype=torch.int64), ()))

    card = model_card(replace(facts), [1] * 200, "run", None, STORAGE)

    assert "class-029 and 170 more. Every image" in card
    assert "class-029 (1) and 170 more." in card
    assert "class-030" not in card


def test_card_has_the_best_epoch_of_each_phase(cache: CacheRef) -> None:
    """The phase of the chosen epoch is marked; a single phase has no table, nor has a run that recorded none."""
    plan = FineTuningPlan(epochs=1, flip=True, reason="1 epochs of all layers: because")
    phases = [(0, "head, weight decay 3"), (2, "all layers, weight decay 0.05")]
    facts = facts_of(cache, train=TrainConfig(), plan=plan, phases=phases)
    card = card_of(facts)

    metrics = facts.history[1]
    values = [f"{metrics.val_accuracy:.4f}", f"{metrics.val_calibrated_loss:.4f}"]
    best = min((0, 1), key=lambda epoch: facts.history[epoch].val_calibrated_loss)
    assert rows_of(card, "head, weight decay 3")[1:3] == ["2", str(best)]
    assert rows_of(card, "head, weight decay 3")[5] == "chosen"
    assert rows_of(card, "all layers, weight decay 0.05")[1:3] == ["1", "2"]
    assert rows_of(card, "fine-tuning") == ["fine-tuning", "1 epochs of all layers: because"]
    assert best != 1 or rows_of(card, "head, weight decay 3")[3:5] == values
    head, layers = facts.history[best].val_accuracy, facts.history[2].val_accuracy
    assert why_chosen(facts) == (
        f"'head, weight decay 3' is the best by val_calibrated_loss (val accuracy {head:.4f} of the head, {layers:.4f} "
        "after it); fine-tuning: 1 epochs of all layers: because"
    )
    for few in ([], phases[:1]):
        assert "| phase |" not in card_of(facts_of(cache, phases=few))
        assert why_chosen(facts_of(cache, phases=few)) == ""


def test_card_has_the_cross_validation_of_the_head(cache: CacheRef) -> None:
    """Without one, it says nothing of it."""
    facts = facts_of(cache, train=TrainConfig(folds=5))
    sentence = "In a cross-validation with 5 parts of `train` and `val`, a head on the features before fine-tuning has"

    assert f"{sentence} a mean accuracy of 0.9000, and a 95 % interval from 0.8500 to 0.9500." in card_of(
        replace(facts, folds=(0.9, 0.85, 0.95))
    )
    assert "cross-validation" not in card_of(facts)
