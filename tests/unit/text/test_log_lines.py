"""Names from outside in log lines, errors, tables and Markdown: on their line, and in plain sight."""

import io
import logging
from collections.abc import Iterator, Mapping

import pytest

from tasks.errors import DiskFull, OutOfTime, RunDeleted, TrackingAway, WrongInput
from tasks.etl.checks import BadFile, NearPair
from tasks.metrics.mistakes import Mistake, mistake_table
from tasks.spark.worker_log import say
from tasks.text.log_lines import OneLine
from tasks.text.markup import markdown_code, markdown_fence, markdown_text
from tasks.text.printable import printable

NAMES = {
    "cat\x1b[2Jred.jpg": r"cat\x1b[2Jred.jpg",
    "a\nERROR forged line.jpg": r"a\nERROR forged line.jpg",
    "a\r\x85b.jpg": r"a\r\x85b.jpg",
    "photo\u202egpj.exe": r"photo\u202egpj.exe",
    "a\u2028b\u200b.jpg": r"a\u2028b\u200b.jpg",
    "\udcff.jpg": r"\udcff.jpg",
}
HIDDEN = "\x1b\n\r\x85\u202e\u2028\u200b\udcff"


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """What a handler with the filter writes of the logger `lakevision.test`."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.addFilter(OneLine())
    logger = logging.getLogger("lakevision.test")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield stream
    logger.removeHandler(handler)


@pytest.mark.parametrize(("name", "shown"), NAMES.items())
def test_name_from_outside_stays_on_its_log_line(name: str, shown: str, lines: io.StringIO) -> None:
    """As an argument, and within a message that is already put together."""
    logger = logging.getLogger("lakevision.test")
    logger.info("read %s, %d bytes", name, 7)
    logger.info("%(name)s is bad", {"name": name})
    logger.info(f"read {name}")

    assert lines.getvalue() == f"read {shown}, 7 bytes\n{shown} is bad\nread {shown}\n"


def test_line_breaks_of_a_message_of_our_own_stay(lines: io.StringIO) -> None:
    """The summary has lines, whose names begin none; credentials leave a line, percent signs stay."""
    logging.getLogger("lakevision.test").info("summary\n%s\n%s", "a\nb", "https://u:hush@h 100%")

    assert lines.getvalue() == "summary\na\\nb\nhttps://***@h 100%\n"


@pytest.mark.parametrize("kind", [WrongInput, DiskFull, TrackingAway, RunDeleted, OutOfTime])
@pytest.mark.parametrize(("name", "shown"), NAMES.items())
def test_name_from_outside_stays_on_the_line_of_an_error(kind: type[Exception], name: str, shown: str) -> None:
    """And handed on as text, as ranks do, the sentence stays as it is."""
    sentence = str(kind(f"the file '{name}' cannot be read"))

    assert sentence == f"the file '{shown}' cannot be read"
    assert str(kind(sentence)) == sentence


@pytest.mark.parametrize(("name", "shown"), NAMES.items())
def test_name_from_outside_stays_on_the_line_of_a_worker(
    name: str, shown: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Lines without the worker's mark would be lost."""
    say(f"read {name}")

    assert capfd.readouterr().err == f"lakevision-worker: read {shown}\n"


@pytest.mark.parametrize(("name", "shown"), NAMES.items())
def test_tables_for_a_user_show_names_in_plain_sight(name: str, shown: str) -> None:
    """Those of the ETL and of the mistakes, which are artifacts of Prefect and MLflow."""
    bad = BadFile(path=name, reason="unreadable", detail=name)
    pair = NearPair(bits=1, path=name, label=name, split="train", other_path=name, other_label=name, other_split="val")
    mistake = Mistake(row=0, true=0, predicted=0, probability=0.9, true_probability=0.1, loss=2.3)
    table = mistake_table([mistake], [name], [name])

    assert (bad.path, bad.detail) == (shown, shown)
    assert {pair.path, pair.label, pair.other_path, pair.other_label} == {shown}
    assert (table["image"], table["true"], table["predicted"]) == ([shown], [shown], [shown])


@pytest.mark.parametrize("name", NAMES)
def test_markdown_has_nothing_hidden(name: str) -> None:
    """As text and as code; a name that is none of this kind stays as it is."""
    assert not set(HIDDEN) & set(markdown_text(name) + markdown_code(name))
    assert printable("größe 中 é.jpg") == "größe 中 é.jpg"


@pytest.mark.parametrize("text", ["a", "```", "x\n```\n# not a heading\n````\n", "`" * 9, ""])
def test_nothing_within_a_fence_ends_it(text: str) -> None:
    """The fence is longer than each run of backticks within."""
    first, *inner, last = markdown_fence(text, "sh").splitlines()

    assert first == f"{last}sh"
    assert set(last) == {"`"}
    assert len(last) >= 3
    assert "\n".join(inner) == text.rstrip("\n") or text.endswith("\n")
    assert last not in "\n".join(inner)


class Names(Mapping[str, str]):
    """A mapping that is not a dict."""

    def __getitem__(self, name: str) -> str:
        """Return the one value."""
        return {"a": "x"}[name]

    def __iter__(self) -> Iterator[str]:
        """Return the one name."""
        return iter(["a"])

    def __len__(self) -> int:
        """Return 1."""
        return 1


class Count:
    """A number to Python's formatting, as a tensor is, and not one of `numbers.Number`."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __int__(self) -> int:
        """Return it as `%d` shows it."""
        return int(self.value)

    def __float__(self) -> float:
        """Return it as `%.3f` shows it."""
        return float(self.value)


@pytest.mark.parametrize(
    ("message", "arguments", "written"),
    [
        ("%d", [Count(3)], "3"),
        ("loss\n%.3f %s", [Count(0.5), "a\nb"], "loss\n0.500 a\\nb"),
        ("%(a)s", [Names()], "x"),
        ("%r %s", ["it's", None], '"it\'s" None'),
        ("%s", [{"a": "x"}], "{'a': 'x'}"),
        ("100%", [], "100%"),
    ],
)
def test_good_line_is_as_it_would_be_without_the_filter(
    message: str, arguments: list[object], written: str, lines: io.StringIO
) -> None:
    """Numbers of other libraries, mappings and representations."""
    logging.getLogger("lakevision.test").info(message, *arguments)

    assert lines.getvalue() == f"{written}\n"


class Unwritable:
    """A value whose text cannot be had."""

    def __str__(self) -> str:
        raise RuntimeError("closed")


@pytest.mark.parametrize(
    ("message", "arguments", "template"),
    [
        ("%d images", ["seven"], "%d images"),
        ("no place", ["for this\x1b"], "no place"),
        ("%s and %s", ["one"], "%s and %s"),
        ("%(b)s", [{"a": 1}], "%(b)s"),
        ("%s\x1b", [Unwritable()], r"%s\x1b"),
        ("%d %%d\n", ["a\nb"], r"%d %%d\n"),
    ],
)
def test_mistake_in_a_log_line_does_not_end_the_code_that_logs(
    message: str, arguments: list[object], template: str, lines: io.StringIO
) -> None:
    """Other packages make such mistakes; what the line was to say is still shown, and why it is not whole."""
    logging.getLogger("lakevision.test").info(message, *arguments)

    (line,) = lines.getvalue().splitlines()
    assert line.startswith(f"{template} (this line's values could not be written: ")
    assert not set(HIDDEN) & set(line)


def test_line_is_the_same_in_every_handler(lines: io.StringIO) -> None:
    """The record is shared: what the first handler escaped, the second takes as it is."""
    second = io.StringIO()
    handler = logging.StreamHandler(second)
    handler.addFilter(OneLine())
    logger = logging.getLogger("lakevision.test")
    logger.addHandler(handler)
    try:
        logger.info("summary\n%s", "a\nb")
    finally:
        logger.removeHandler(handler)

    assert second.getvalue() == lines.getvalue() == "summary\na\\nb\n"
