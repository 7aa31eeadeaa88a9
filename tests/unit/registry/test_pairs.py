"""Pairs of predictions of the test images, joined by name of the class."""

import pyarrow as pa

from tasks.predict.predictions import JUDGED_ARROW
from tasks.registry.pairs import COUNTED, JUDGED, PAIRS, SPLIT_ARROW
from tasks.storage import Storage
from tasks.tables.relations import Relations

NFC, NFD = "Caf\u00e9", "Cafe\u0301"


def test_classes_are_the_same_in_any_form_of_unicode(storage: Storage) -> None:
    """A champion of an older release, whose classes are decomposed, is right on images with composed labels."""
    tested = [{"sha256": "1", "label": NFC}, {"sha256": "2", "label": "bar"}, {"sha256": "3", "label": NFD}]
    champion = [{"sha256": "1", "label": NFD}, {"sha256": "2", "label": NFD}, {"sha256": "3", "label": NFD}]
    challenger = [{"sha256": name, "label": "unsure", "top_labels": [NFC, "bar"]} for name in "123"]
    for row in (*tested, *champion, *challenger):
        row["content_sha256"] = row["sha256"]
    with Relations(storage) as relations:
        relations.add("tested", pa.Table.from_pylist(tested))
        relations.add("champion", pa.Table.from_pylist(champion, schema=JUDGED_ARROW))
        relations.add("challenger", pa.Table.from_pylist(challenger, schema=JUDGED_ARROW))
        for name in ("challenger", "champion"):
            relations.add(f"{name}_saw", SPLIT_ARROW.empty_table())
            relations.add(f"{name}_again", JUDGED_ARROW.empty_table())
        relations.run(COUNTED, {"test": "test"})
        for name in ("challenger", "champion"):
            relations.run(JUDGED.format(name=name))

        assert sorted(relations.rows(PAIRS)) == [(NFC, NFC, NFC, 2), ("bar", NFC, NFC, 1)]
