"""Column names and types of all tables, defined once as Arrow schemas, from which those for Spark follow.

Shape legend, used as suffix of names: B batch, C channels (3), H height, W width, K classes, F features.
"""

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema

UTC_TIME = pa.timestamp("us", tz="UTC")

STORED, DUPLICATE, QUARANTINED, IGNORED, DELETED = "stored", "duplicate", "quarantined", "ignored", "deleted"


def columns_of(schema: pa.Schema, *names: str) -> pa.Schema:
    """Return the schema of these columns, in this order."""
    return pa.schema([schema.field(name) for name in names])


IMAGES_ARROW = pa.schema(
    [
        pa.field("sha256", pa.string(), nullable=False),
        pa.field("label", pa.string(), nullable=False),
        pa.field("content", pa.binary(), nullable=False),
        pa.field("width", pa.int32(), nullable=False),
        pa.field("height", pa.int32(), nullable=False),
        pa.field("split", pa.string(), nullable=False),
        ("dhash", pa.int64()),
        pa.field("ingested_at", UTC_TIME, nullable=False),
    ]
)
"""One row per image; sha256 is that of the original file, width and height (pixels) are the original's.

dhash is the perceptual hash for the detection of near-duplicates: 64 bits as a signed integer.
"""

FILES_ARROW = pa.schema(
    [
        pa.field("path", pa.string(), nullable=False),
        ("label", pa.string()),
        ("split", pa.string()),
        pa.field("size", pa.int64(), nullable=False),
        pa.field("modified_at", UTC_TIME, nullable=False),
        ("sha256", pa.string()),
        pa.field("outcome", pa.string(), nullable=False),
        ("reason", pa.string()),
        ("detail", pa.string()),
        pa.field("seen_at", UTC_TIME, nullable=False),
        ("changed_at", UTC_TIME),
        ("inode", pa.int64()),
    ]
)
"""The ledger: one row per source file; path is relative to the source, size in bytes.

An unusable file has a split only if its path or the label file assigns one. Files of a store have neither changed_at,
the time of the last change of the status (ctime), nor inode, its number as a signed integer.
"""

ADDED_TO_FILES = ("changed_at", "inode")
"""Columns that a ledger, or a table `inputs`, of an earlier release lacks; they are added, and null in its rows."""

IMAGES = from_arrow_schema(IMAGES_ARROW)
FILES = from_arrow_schema(FILES_ARROW)

PREDICTION_ARROW = pa.schema(
    [
        ("label", pa.string()),
        ("probability", pa.float64()),
        ("error", pa.string()),
        ("index", pa.int32()),
        ("top_labels", pa.list_(pa.field("element", pa.string()))),
        ("top_probabilities", pa.list_(pa.field("element", pa.float64()))),
        ("precision", pa.string()),
        ("unknown_score", pa.float64()),
    ]
)
"""Prediction of one image: its label and probability (0-1), or the error.

index is the number of the label's class, and precision that of the computation. top_labels are the most probable
classes in descending order, with the probabilities top_probabilities. The score of images of no class is
unknown_score (0-1).
"""

PREDICTION = from_arrow_schema(PREDICTION_ARROW)

ADDED_TO_PREDICTIONS = ("index", "top_labels", "top_probabilities", "precision", "content_sha256", "unknown_score")
"""Columns that a table of an earlier release lacks; they are added to it, and null in its rows."""

CHANGE_FEED = "delta.enableChangeDataFeed"
PREDICTIONS_PROPERTIES = {CHANGE_FEED: "true"}
"""Delta properties of the table of predictions: its readers follow new and changed rows."""

PREDICTIONS_PARTITION = ("model_version",)
"""Partition columns of a new table of predictions: a run of inference reads and writes one model version."""

PREDICTIONS_KEY = ("sha256", "model_name", "model_version")

PREDICTIONS_ARROW = pa.schema(
    [
        pa.field("sha256", pa.string(), nullable=False),
        pa.field("model_name", pa.string(), nullable=False),
        pa.field("model_version", pa.int64(), nullable=False),
        *PREDICTION_ARROW,
        ("content_sha256", pa.string()),
        pa.field("predicted_at", UTC_TIME, nullable=False),
    ]
)
"""One row per image and model version.

sha256 is the key of the image, the digest of its original file. content_sha256 is the digest of the bytes that were
predicted: those of the file, or those of a table, where a large image is scaled down.
"""

PREDICTIONS = from_arrow_schema(PREDICTIONS_ARROW)

INPUTS_KEY = ("source", "path")

INPUTS_ARROW = pa.schema(
    [
        pa.field("source", pa.string(), nullable=False),
        *(FILES_ARROW.field(name) for name in ("path", "size", "modified_at", "sha256")),
        ("error", pa.string()),
        *(FILES_ARROW.field(name) for name in ("seen_at", *ADDED_TO_FILES)),
    ]
)
"""The table `inputs`: one row per file that was predicted without a table of images.

source is an absolute path or a URL, path is relative to it, and size in bytes. A file that cannot be read has no
sha256, and the reason in error. seen_at is the time at which a run recorded the other values.
"""

INPUTS = from_arrow_schema(INPUTS_ARROW)

SUSPECTS_ARROW = pa.schema(
    [
        pa.field("found_at", UTC_TIME, nullable=False),
        pa.field("rank", pa.int64(), nullable=False),
        *(IMAGES_ARROW.field(name) for name in ("sha256", "label", "split")),
        pa.field("suggested", pa.string(), nullable=False),
        pa.field("score", pa.float64(), nullable=False),
        ("table_id", pa.string()),
        ("table_version", pa.int64()),
    ]
)
"""The table `suspects`: labels that one run has found suspicious, the most suspicious with rank 1.

score is the logarithm of the label's probability by that of the class suggested. table_id and table_version name the
version of the table `images`.
"""

PROMOTIONS_ARROW = pa.schema(
    [
        pa.field("decision_id", pa.string(), nullable=False),
        pa.field("decided_at", UTC_TIME, nullable=False),
        pa.field("model_name", pa.string(), nullable=False),
        pa.field("decision", pa.string(), nullable=False),
        ("from_version", pa.int64()),
        ("to_version", pa.int64()),
        pa.field("run_id", pa.string(), nullable=False),
        ("images", pa.int64()),
        ("challenger_accuracy", pa.float64()),
        ("champion_accuracy", pa.float64()),
        ("challenger_macro_f1", pa.float64()),
        ("champion_macro_f1", pa.float64()),
        ("p_value", pa.float64()),
        pa.field("reason", pa.string(), nullable=False),
        ("approved_by", pa.string()),
    ]
)
"""The table `promotions`: one row per decision, which is `promoted`, `kept` or `rolled back`.

The champion was from_version before the decision, and is to_version after it; null is none. The MLflow run that was
considered is run_id. If a user was asked, approved_by is the name of that user. Accuracies and macro F1 (0-1) are of
the split `test`, on so many images.
"""

REQUESTS_ARROW = pa.schema(
    [
        pa.field("day", pa.string(), nullable=False),
        pa.field("request_id", pa.string(), nullable=False),
        pa.field("image", pa.int32(), nullable=False),
        pa.field("answered_at", UTC_TIME, nullable=False),
        ("model_name", pa.string()),
        ("model_version", pa.int64()),
        ("answered_by", pa.string()),
        ("label", pa.string()),
        ("probability", pa.float64()),
        ("top_labels", pa.list_(pa.string())),
        ("top_probabilities", pa.list_(pa.float64())),
        ("unknown_score", pa.float64()),
        ("error", pa.string()),
        ("seconds", pa.float64()),
        ("sha256", pa.string()),
        ("other_version", pa.int64()),
        ("other_label", pa.string()),
    ]
)
"""The table `requests`: one row per image of a request over HTTP, with its answer; image is its number, from 0.

answered_by is `champion` or `challenger`, and seconds the time from the arrival of the request to the answer. In a live
test, other_version and other_label are the version that did not answer, and the label that it would have given. The
table is partitioned by day, `YYYY-MM-DD` in UTC, with which a request_id begins.
"""

FEEDBACK_ARROW = pa.schema(
    [
        *columns_of(REQUESTS_ARROW, "day", "request_id", "image"),
        pa.field("label", pa.string(), nullable=False),
        pa.field("given_at", UTC_TIME, nullable=False),
    ]
)
"""The table `feedback`: the right label of an image of `requests`; day is that of the request."""

REQUEST_IMAGES_ARROW = pa.schema(
    [
        pa.field("day", pa.string(), nullable=False),
        pa.field("sha256", pa.string(), nullable=False),
        pa.field("content", pa.binary(), nullable=False),
    ]
)
"""The table `request_images`: images of requests, by day, if the service keeps them."""

FILE_ARROW = pa.schema(
    [field.with_nullable(True) for field in columns_of(FILES_ARROW, "path", "size", "modified_at", *ADDED_TO_FILES)]
)
"""Columns of a listed file; path is relative to the source, size in bytes."""

LISTING_ARROW = FILE_ARROW.insert(1, pa.field("label", pa.string())).insert(2, pa.field("split", pa.string()))
"""Columns of a source's listing, before a file is read; split is null where the content determines it."""

GROUPS_ARROW = pa.schema([("path", pa.string()), ("name", pa.string())])
"""Columns of the groups in a label file; path is in Unicode's composed form."""

TO_PREDICT_ARROW = pa.schema([*FILE_ARROW, ("known_sha256", pa.string())])
"""Columns of a file to predict; known_sha256 is that of its row in `inputs`, as `ledger_sha256` of TO_READ_ARROW."""

TO_READ_ARROW = pa.schema([*LISTING_ARROW, ("ledger_sha256", pa.string())])
"""Columns of a file to read.

ledger_sha256 is that of its row in the ledger, if only changed_at or inode differ from it; else null. Nothing follows
where the content is the same.
"""

IMAGE_KEYS_ARROW = columns_of(IMAGES_ARROW, "sha256", "label", "split")
"""Columns that identify a file and a row of `images` as the same image."""

READ_ARROW = pa.schema(
    [
        *TO_READ_ARROW,
        *((name, pa.string()) for name in ("sha256", "part", "reason", "detail")),
        ("read_failed", pa.bool_()),
        ("dhash", pa.int64()),
    ]
)
"""Columns after a file was read and decoded; `part` names the file that contains the image.

If reason is set, part is null; otherwise split is not null. read_failed is whether the file may be there, but cannot be
read.
"""
