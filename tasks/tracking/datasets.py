"""The data of a training run as MLflow datasets: one per split, with table version and content digest."""

import hashlib
import json
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass

from mlflow.entities import Dataset, DatasetInput, InputTag
from mlflow.utils.mlflow_tags import MLFLOW_DATASET_CONTEXT

from tasks.credentials import without_credentials
from tasks.refs import TableRef

DELTA_SOURCE = "delta_table"
"""The source type by which `mlflow.data.get_source` resolves a Delta table."""

DIGEST_CHARACTERS = 16
"""MLflow accepts at most 36 and shows all of them in its lists; 64 bits distinguish the versions of a table."""

TABLE_CHARACTERS = 8
"""Characters of the digest that distinguish tables with the same content."""

NAME_CHARACTERS = 100


@dataclass(frozen=True)
class TrainingData:
    """The version of a table that a run is trained on."""

    table: TableRef
    content_digest: str
    rows: Mapping[str, int]
    """Images by split."""
    source: str | None
    """Folder or URL that the images came from; None if the table does not record it."""


def dataset_inputs(data: TrainingData) -> list[DatasetInput]:
    """Return a dataset per split.

    MLflow's own `load_delta` uses a digest of the query plan, which does not depend on the content, and its source
    lacks version 0 and the table's id.
    """
    source = {
        "path": without_credentials(data.table.path),
        "delta_table_version": data.table.version,
        "delta_table_id": data.table.table_id,
        "images_from": data.source,
    }
    # MLflow takes datasets of one name and digest for the same, and would show the source of the first one.
    table = hashlib.sha256(f"{data.table.path}|{data.table.table_id}".encode()).hexdigest()
    digest = f"{data.content_digest[:DIGEST_CHARACTERS]}-{table[:TABLE_CHARACTERS]}"
    schema = {"mlflow_colspec": [{"name": "content", "type": "binary"}, {"name": "label", "type": "string"}]}
    return [
        DatasetInput(
            Dataset(
                # The split is part of the name, since a run stores each pair of name and digest only once.
                name=f"{_short_name(data)} v{data.table.version} {split}",
                digest=digest,
                source_type=DELTA_SOURCE,
                source=json.dumps({name: value for name, value in source.items() if value not in (None, "")}),
                schema=json.dumps(schema),
                profile=json.dumps({"num_rows": rows, "content_digest": data.content_digest}),
            ),
            tags=[InputTag(MLFLOW_DATASET_CONTEXT, split)],
        )
        for split, rows in data.rows.items()
    ]


def _short_name(data: TrainingData) -> str:
    """Return the last folder of the source, or that of the table's path if the source is unknown."""
    name = posixpath.basename((data.source or data.table.path).rstrip("/"))
    # Folder names may have line breaks and escape sequences; MLflow's lists show one line.
    shown = "".join(character if character.isprintable() else " " for character in name)
    return " ".join(shown.split())[:NAME_CHARACTERS] or "images"
