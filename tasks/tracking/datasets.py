"""The data of a training run as MLflow's datasets: one per split, with the table's version and its content digest."""

import json
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass

from mlflow.entities import Dataset, DatasetInput, InputTag
from mlflow.utils.mlflow_tags import MLFLOW_DATASET_CONTEXT

from tasks.credentials import without_credentials
from tasks.refs import TableRef

DELTA_SOURCE = "delta_table"
"""The type under which `mlflow.data.get_source` finds a Delta table again."""

DIGEST_CHARACTERS = 16
"""MLflow takes at most 36 and shows all of them in its lists; 64 bits tell the versions of a table apart."""

NAME_CHARACTERS = 100


@dataclass(frozen=True)
class TrainingData:
    """The version of a table that a run is trained on."""

    table: TableRef
    content_digest: str
    rows: Mapping[str, int]
    """Images by split."""
    source: str | None
    """Folder or URL that the images came from; None where the table does not say."""


def dataset_inputs(data: TrainingData) -> list[DatasetInput]:
    """Return a dataset per split.

    MLflow's own `load_delta` takes a digest of the query plan, which says nothing about the content, and its source
    leaves out version 0 and the table's id.
    """
    source = {
        "path": without_credentials(data.table.path),
        "delta_table_version": data.table.version,
        "delta_table_id": data.table.table_id,
        "images_from": data.source,
    }
    schema = {"mlflow_colspec": [{"name": "content", "type": "binary"}, {"name": "label", "type": "string"}]}
    return [
        DatasetInput(
            Dataset(
                # The split is in the name: a run has each pair of name and digest once.
                name=f"{_short_name(data)} v{data.table.version} {split}",
                digest=data.content_digest[:DIGEST_CHARACTERS],
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
    """Return the last folder of the source, or of the table where the source is not known."""
    name = posixpath.basename((data.source or data.table.path).rstrip("/"))
    # A folder may be called anything; a list shows one line.
    shown = "".join(character if character.isprintable() else " " for character in name)
    return " ".join(shown.split())[:NAME_CHARACTERS] or "images"
