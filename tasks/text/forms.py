"""Forms of Unicode: labels and paths that look the same are compared in their composed form, NFC.

A letter with an accent is one character or two: file names from macOS have two, and text that is typed has one.
Unicode Standard Annex #15 defines the composed form, which the World Wide Web Consortium recommends for text.
"""

import unicodedata
from collections.abc import Callable, Collection, Iterable


def composed(text: str) -> str:
    """Return text in its composed form, NFC."""
    return text if text.isascii() else unicodedata.normalize("NFC", text)


def as_known(known: Collection[str]) -> Callable[[str], str]:
    """Return a function that maps a label to a known label with the same composed form.

    A label that is known stays as it is. Of several known forms, the composed one counts. The function returns the
    composed form of a label without a known form.

    Args:
        known: Labels, with a fast lookup: a set, or the keys of a dict.
    """
    decomposed = {composed(label): label for label in known if composed(label) != label}

    def find(label: str) -> str:
        if label in known:
            return label
        form = composed(label)
        return form if form in known else decomposed.get(form, form)

    return find


def look_alikes(labels: Iterable[str]) -> list[list[str]]:
    """Return the labels that are equal after composing and stripping, in groups of at least two, sorted."""
    groups: dict[str, set[str]] = {}
    for label in labels:
        groups.setdefault(composed(label).strip(), set()).add(label)
    return sorted(sorted(group) for group in groups.values() if len(group) > 1)


def shown(labels: Collection[str]) -> str:
    """Return labels for a message, quoted, with escapes for all characters but those of ASCII."""
    *others, last = map(ascii, labels)
    return f"{', '.join(others)} and {last}" if others else last
