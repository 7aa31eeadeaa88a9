"""Fonts of the figures: names in scripts that matplotlib's own font lacks are drawn with the fonts of the machine."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from tasks.errors import join_names
from tasks.text.markup import printable

NUM_NAMED = 5
"""Maximum number of characters that a sentence names."""

WAY_OUT = (
    "install a font that has them (Debian: fonts-noto-core, for East Asian scripts fonts-noto-cjk), and train again"
)


@contextmanager
def drawn_with_fonts(texts: Iterable[str]) -> Iterator[str]:
    """Draw the figures of the block with fonts that have the characters of the texts.

    Yields:
        A sentence about the characters that no font of this machine has, or an empty string.
    """
    from matplotlib import rc_context, rcParams
    from matplotlib.font_manager import FontProperties, findfont, findSystemFonts, fontManager
    from matplotlib.ft2font import FT2Font

    missing = {ord(character) for text in texts for character in printable(text)}
    missing -= FT2Font(findfont(FontProperties())).get_charmap().keys()
    families: list[str] = [*rcParams["font.family"]]
    # Only then: matplotlib's own list of fonts does not have those that were installed after its first use.
    for path in sorted(findSystemFonts()) if missing else []:
        try:
            font = FT2Font(path)
        except RuntimeError:  # of FreeType, for a font of bitmaps, such as coloured emoji
            continue
        if missing & (found := font.get_charmap().keys()):
            fontManager.addfont(path)
            families.append(font.family_name)
            missing -= found
    with rc_context({"font.family": families}):
        yield sentence("".join(map(chr, sorted(missing))))


def sentence(missing: str) -> str:
    """Return a sentence about characters that no font has, or an empty string for none."""
    if not missing:
        return ""
    named = join_names([f"'{character}'" for character in missing[:NUM_NAMED]], len(missing))
    return f"The fonts of this machine lack {named}: the figures show boxes in their place; {WAY_OUT}."
