"""Pairs of predictions of the test images, joined by name of the class."""

import pyarrow as pa

from tasks.registry.pairs import COUNTED, LABELS_ARROW, PAIRS, SPLIT_ARROW, TESTED_ARROW
from tasks.storage import Storage
from tasks.tables.relations import Relations

NFC, NFD = "Caf\u00e9", "Cafe\u0301"


def test_classes_are_the_same_in_any_form_of_unicode(storage: Storage) -> None:
    """A champion of an older release, whose classes are decomposed, is right on images with composed labels."""
    tested = [{"sha256": "1", "label": NFC}, {"sha256": "2", "label": "bar"}, {"sha256": "3", "label": NFD}]
    champion = [{"sha256": "1", "label": NFD}, {"sha256": "2", "label": NFD}, {"sha256": "3", "label": NFD}]
    challenger = [{"sha256": name, "label": "unsure", "top_labels": [NFC, "bar"]} for name in "123"]
    with Relations(storage) as relations:
        relations.add("tested", pa.Table.from_pylist(tested, schema=TESTED_ARROW))
        relations.add("champion", pa.Table.from_pylist(champion, schema=LABELS_ARROW))
        relations.add("challenger", pa.Table.from_pylist(challenger, schema=LABELS_ARROW))
        for name in ("challenger_saw", "champion_saw"):
            relations.add(name, SPLIT_ARROW.empty_table())
        relations.run(COUNTED, {"test": "test"})

        assert sorted(relations.rows(PAIRS)) == [(NFC, NFC, NFC, 2), ("bar", NFC, NFC, 1)]
