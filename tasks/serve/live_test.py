"""The live test: champion and challenger on the same images of requests, decided by labels where the two differ.

Where both give the same label, it cannot tell which one is better: only the images that differ are asked for. Their
labels count in the order of the answers, without a gap: a user who reports mistakes alone would otherwise decide.
"""

import logging
from collections.abc import Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
from pyarrow.dataset import field

from tasks.config.promotion import PromoteConfig
from tasks.config.serving import LiveTestConfig
from tasks.config.storage import SparkConfig
from tasks.errors import WrongInput
from tasks.interval import wilson_interval
from tasks.object_store import file_system
from tasks.predict.champion import champion_of
from tasks.predict.thumbnails import thumbnail
from tasks.refs import AskedImage, LiveOutcome, LiveReport, ModelRef, VersionAccuracy
from tasks.registry.aliases import CHALLENGER, CHAMPION
from tasks.registry.promote import promote_challenger
from tasks.schema import FEEDBACK_ARROW, REQUEST_IMAGES_ARROW, REQUESTS_ARROW, columns_of
from tasks.serve.request_log import rows_of
from tasks.serve.sequential import Tally, follow
from tasks.spark.session import try_without_spark
from tasks.storage import Storage
from tasks.tables.direct_commits import open_newest
from tasks.text.forms import composed
from tasks.tracking.models import model_with_alias
from tasks.tracking.server import reachable

logger = logging.getLogger("lakevision.serve")

KEY = ("request_id", "image")
ANSWERS_ARROW = columns_of(
    REQUESTS_ARROW,
    *KEY,
    "answered_at",
    "model_name",
    "model_version",
    "label",
    "other_version",
    "other_label",
    "sha256",
)

Labels = Mapping[tuple[str, int] | str, str]
"""Right labels, by request and image, or by sha256."""


def label_of(labels: Labels, sha256: str, request_id: str, image: int) -> str | None:
    """Return the right label of an image, or None if it is not known."""
    # A digest names late labels alone, which count more than feedback.
    return labels.get(sha256) or labels.get((request_id, image))


def compare_live(
    live: LiveTestConfig, promote: PromoteConfig, storage: Storage, spark: SparkConfig = SparkConfig()
) -> LiveReport:
    """Compare the challenger with the champion, and make it the champion if it is better.

    Args:
        live: Settings of the test.
        promote: Name of the registered model, and who decides.
        storage: Location of the tables and of the registry.
        spark: Settings of the session, which is started only to derive a name from a table that only Spark can read.

    Raises:
        WrongInput: Champion or challenger is missing, or the labels cannot be read. Or as `promote_challenger`.
        TrackingUnavailable: The tracking server does not answer.
    """
    champion = try_without_spark(lambda session: champion_of(promote, CHAMPION, storage, session), spark, storage)
    with reachable(storage):
        challenger = model_with_alias(storage, champion.name, CHALLENGER)
    if challenger is None or challenger == champion:
        raise WrongInput(
            f"the registered model '{champion.name}' has no version with the alias '{CHALLENGER}' beside the champion",
            way_out="give the alias to a version in MLflow, and start the service with serve.challenger",
        )
    labels = feedback_labels(storage) | (late_labels(live.labels) if live.labels else {})
    num_compared, differences = differing(storage, champion, challenger)
    tally = follow(outcomes(differences, labels)[: live.max_labels], live.alpha)
    has_ended = tally.verdict == "undecided" and tally.num_labels >= live.max_labels
    outcome: LiveOutcome = "ended" if has_ended else tally.verdict
    about = sentence(outcome, tally, champion, challenger, len(differences), live)
    if outcome == "better" and live.decide and promote.approval == "auto":
        promote_challenger(storage, champion, challenger, about)
        champion, outcome, about = challenger, "promoted", f"{about}; it is the champion now"
    logger.info("%s", about)
    unlabelled = [it for it in differences if label_of(labels, it.sha256, it.request_id, it.image) is None]
    return LiveReport(
        champion=champion,
        challenger=challenger.version,
        outcome=outcome,
        line=about,
        num_compared=num_compared,
        num_differing=len(differences),
        num_labels=tally.num_labels,
        num_better=tally.num_better,
        num_worse=tally.num_worse,
        p_value=tally.p_value,
        accuracies=live_accuracies(storage, champion.name, labels),
        asked=asked_images(storage, unlabelled[: live.num_asked]) if outcome == "undecided" else (),
    )


def differing(storage: Storage, champion: ModelRef, challenger: ModelRef) -> tuple[int, list[AskedImage]]:
    """Return the number of images that both versions have predicted, and the differences in the order of the answers.

    An image that came several times counts once.

    Raises:
        NeedsSpark: Only Spark can read the table.
    """
    ours, theirs = champion.version, challenger.version
    by_champion = (field("model_version") == ours) & (field("other_version") == theirs)
    by_challenger = (field("model_version") == theirs) & (field("other_version") == ours)
    is_compared = (field("model_name") == champion.name) & (by_champion | by_challenger)
    rows = rows_of(storage, "requests", ANSWERS_ARROW, is_compared)
    num_compared = pc.count_distinct(rows["sha256"]).as_py()
    rows = rows.filter(pc.fill_null(pc.not_equal(rows["label"], rows["other_label"]), False))
    rows = rows.sort_by([("answered_at", "ascending"), ("request_id", "ascending"), ("image", "ascending")])
    found: dict[str, AskedImage] = {}
    for row in rows.to_pylist():
        pair = row["label"], row["other_label"]
        own, other = pair if row["model_version"] == ours else pair[::-1]
        key = {name: row[name] for name in (*KEY, "sha256")}
        found.setdefault(row["sha256"], AskedImage(**key, champion_label=own, challenger_label=other))
    return num_compared, list(found.values())


def outcomes(differences: Sequence[AskedImage], labels: Labels) -> list[int]:
    """Return 1 where only the challenger is right, -1 where only the champion is, 0 where neither is.

    They end at the first image without a label.
    """
    found = []
    for difference in differences:
        label = label_of(labels, difference.sha256, difference.request_id, difference.image)
        if label is None:
            break
        right = composed(label)
        found.append((composed(difference.challenger_label) == right) - (composed(difference.champion_label) == right))
    return found


def sentence(
    outcome: str, tally: Tally, champion: ModelRef, challenger: ModelRef, num: int, live: LiveTestConfig
) -> str:
    """Return the result of a test in a sentence."""
    verdicts = {
        "better": "is better",
        "worse": "is worse",
        "undecided": "is not decided to be better",
        "ended": f"is not shown to be better after live.max_labels {live.max_labels}",
    }
    return (
        f"version {challenger.version} of '{champion.name}' {verdicts[outcome]} than version {champion.version}: "
        f"of {num} images on which they differ, the first {tally.num_labels} with a label, it alone is right on "
        f"{tally.num_better}, and the champion on {tally.num_worse} (always-valid p-value {tally.p_value:.3g}, "
        f"alpha {live.alpha:g})"
    )


def feedback_labels(storage: Storage) -> dict[tuple[str, int] | str, str]:
    """Return the labels of the table `feedback`.

    Raises:
        NeedsSpark: Only Spark can read the table.
    """
    rows = rows_of(storage, "feedback", columns_of(FEEDBACK_ARROW, *KEY, "label")).to_pylist()
    return {(row["request_id"], row["image"]): row["label"] for row in rows}


def late_labels(location: str) -> dict[tuple[str, int] | str, str]:
    """Return the labels of a Delta table or CSV file.

    Raises:
        WrongInput: It does not exist, or lacks the columns.
    """
    filesystem, root = file_system(location)
    try:
        if filesystem.exists(f"{root}/_delta_log"):
            rows = open_newest(location).to_pyarrow_table()
        else:
            with filesystem.open(root, "rb") as file:
                # Classes such as 007 are texts.
                texts = dict.fromkeys(("label", "sha256", "request_id"), pa.string())
                rows = pyarrow.csv.read_csv(file, convert_options=pyarrow.csv.ConvertOptions(column_types=texts))
    except (OSError, pa.ArrowInvalid) as error:
        raise WrongInput(
            f"live.labels is '{location}', which cannot be read ({error})",
            setting="live.labels",
            way_out="give a Delta table or a CSV file",
        ) from None
    names = set(rows.column_names)
    if "label" not in names or not ("sha256" in names or names.issuperset(KEY)):
        raise WrongInput(
            f"live.labels is '{location}', which has the columns {', '.join(rows.column_names)[:200]}",
            setting="live.labels",
            way_out="give label and sha256, or label, request_id and image",
        )
    by_digest = "sha256" in names
    return {
        str(row["sha256"]) if by_digest else (str(row["request_id"]), int(row["image"])): str(row["label"])
        for row in rows.to_pylist()
        if row["label"] is not None
    }


def live_accuracies(storage: Storage, name: str, labels: Labels) -> tuple[VersionAccuracy, ...]:
    """Return the accuracy of each version on the images with a label, those included that it predicted in a live test.

    Raises:
        NeedsSpark: Only Spark can read the table.
    """
    requests = {key[0] for key in labels if isinstance(key, tuple)}
    digests = {key for key in labels if isinstance(key, str)}
    has_label = field("request_id").isin(pa.array(requests, pa.string())) | field("sha256").isin(
        pa.array(digests, pa.string())
    )
    rows = rows_of(storage, "requests", ANSWERS_ARROW, (field("model_name") == name) & has_label)
    hits: dict[int, dict[str, bool]] = {}  # An image that came several times counts once.
    for row in rows.to_pylist():
        label = label_of(labels, row["sha256"], row["request_id"], row["image"])
        if label is None:
            continue
        for version, given in ((row["model_version"], row["label"]), (row["other_version"], row["other_label"])):
            if version is not None:
                hits.setdefault(version, {})[row["sha256"]] = composed(given or "") == composed(label)
    return tuple(
        VersionAccuracy(
            version=version,
            images=len(found),
            accuracy=sum(found.values()) / len(found),
            interval=wilson_interval(sum(found.values()), len(found)),
        )
        for version, found in sorted(hits.items())
    )


def asked_images(storage: Storage, differences: Sequence[AskedImage]) -> tuple[AskedImage, ...]:
    """Return the images that need a label, with thumbnails of those that the service keeps.

    Raises:
        NeedsSpark: Only Spark can read the table.
    """
    wanted = pa.array([found.sha256 for found in differences], pa.string())
    columns = columns_of(REQUEST_IMAGES_ARROW, "sha256", "content")
    rows = rows_of(storage, "request_images", columns, field("sha256").isin(wanted)).to_pylist()
    contents = {row["sha256"]: row["content"] for row in rows}
    return tuple(found.model_copy(update={"thumbnail": thumbnail(contents.get(found.sha256))}) for found in differences)
