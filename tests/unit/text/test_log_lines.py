"""External names in log lines, errors, tables and Markdown are escaped and stay on one line."""

import io
import logging
from collections.abc import Iterator, Mapping

import pytest

from tasks.errors import DiskFull, RunDeleted, TimeLimitExceeded, TrackingUnavailable, WrongInput
from tasks.etl.validate import BadFile, NearPair
from tasks.metrics.mistakes import Mistake, mistake_table
from tasks.spark.worker_log import log_from_worker
from tasks.text.log_lines import SingleLineFilter
from tasks.text.markup import markdown_code, markdown_fence, markdown_text, printable

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
    """Yield the stream of a handler with the filter, attached to the logger `lakevision.test`."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.addFilter(SingleLineFilter())
    logger = logging.getLogger("lakevision.test")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield stream
    logger.removeHandler(handler)


@pytest.mark.parametrize(("name", "shown"), NAMES.items())
def test_external_name_stays_on_its_log_line(name: str, shown: str, lines: io.StringIO) -> None:
    """A name is escaped both as an argument and within a formatted message."""
    logger = logging.getLogger("lakevision.test")
    logger.info("read %s, %d bytes", name, 7)
    logger.info("%(name)s is bad", {"name": name})
    logger.info(f"read {name}")

    assert lines.getvalue() == f"read {shown}, 7 bytes\n{shown} is bad\nread {shown}\n"


def test_line_breaks_of_a_format_string_are_kept(lines: io.StringIO) -> None:
    """Line breaks of arguments are escaped, credentials are removed, and percent signs are kept."""
    logging.getLogger("lakevision.test").info("summary\n%s\n%s", "a\nb", "https://u:hush@h 100%")

    assert lines.getvalue() == "summary\na\\nb\nhttps://***@h 100%\n"


@pytest.mark.parametrize("kind", [WrongInput, DiskFull, TrackingUnavailable, RunDeleted, TimeLimitExceeded])
@pytest.mark.parametrize(("name", "shown"), NAMES.items())
def test_external_name_stays_on_the_line_of_an_error(kind: type[Exception], name: str, shown: str) -> None:
    """A name is escaped in an error's message, and an error made from that message, as by ranks, is equal."""
    sentence = str(kind(f"the file '{name}' cannot be read"))

    assert sentence == f"the file '{shown}' cannot be read"
    assert str(kind(sentence)) == sentence


@pytest.mark.parametrize(("name", "shown"), NAMES.items())
def test_external_name_stays_on_the_log_line_of_a_worker(
    name: str, shown: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """A name is escaped in a worker's log, since a line without the worker's prefix would be lost."""
    log_from_worker(f"read {name}")

    assert capfd.readouterr().err == f"lakevision-worker: read {shown}\n"


@pytest.mark.parametrize(("name", "shown"), NAMES.items())
def test_names_in_artifact_tables_are_escaped(name: str, shown: str) -> None:
    """Names are escaped in the tables of the ETL and of the mistakes, which are artifacts of Prefect and MLflow."""
    bad = BadFile(path=name, reason="unreadable", detail=name)
    pair = NearPair(bits=1, path=name, label=name, split="train", other_path=name, other_label=name, other_split="val")
    mistake = Mistake(row=0, true=0, predicted=0, probability=0.9, true_probability=0.1, loss=2.3)
    table = mistake_table([mistake], [name], [name])

    assert (bad.path, bad.detail) == (shown, shown)
    assert {pair.path, pair.label, pair.other_path, pair.other_label} == {shown}
    assert (table["image"], table["true"], table["predicted"]) == ([shown], [shown], [shown])


@pytest.mark.parametrize("name", NAMES)
def test_markdown_has_no_hidden_characters(name: str) -> None:
    """Hidden characters are escaped in text and code, and visible names are unchanged."""
    assert not set(HIDDEN) & set(markdown_text(name) + markdown_code(name))
    assert printable("größe 中 é.jpg") == "größe 中 é.jpg"


@pytest.mark.parametrize("text", ["a", "```", "x\n```\n# not a heading\n````\n", "`" * 9, ""])
def test_fenced_text_cannot_end_the_fence(text: str) -> None:
    """The fence is longer than each run of backticks in the text."""
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
    """A value that can be formatted as a number, like a tensor, but is not a `numbers.Number`."""

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
def test_valid_line_is_unchanged_by_the_filter(
    message: str, arguments: list[object], written: str, lines: io.StringIO
) -> None:
    """Numbers of other libraries, mappings and representations are formatted as without the filter."""
    logging.getLogger("lakevision.test").info(message, *arguments)

    assert lines.getvalue() == f"{written}\n"


class Unwritable:
    """A value whose `__str__` raises an error without a text."""

    def __str__(self) -> str:
        raise Closed


class Closed(Exception):
    """An error without a text, like those of py4j without their JVM."""

    def __str__(self) -> str:
        raise self


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
def test_formatting_error_in_a_log_line_is_not_raised(
    message: str, arguments: list[object], template: str, lines: io.StringIO
) -> None:
    """A formatting error, often another package's, is logged with the format string and the reason."""
    logging.getLogger("lakevision.test").info(message, *arguments)

    (line,) = lines.getvalue().splitlines()
    assert line.startswith(f"{template} (this line's values could not be written: ")
    assert not set(HIDDEN) & set(line)


def test_line_is_the_same_in_every_handler(lines: io.StringIO) -> None:
    """Handlers share the record, and the second one does not escape it again."""
    second = io.StringIO()
    handler = logging.StreamHandler(second)
    handler.addFilter(SingleLineFilter())
    logger = logging.getLogger("lakevision.test")
    logger.addHandler(handler)
    try:
        logger.info("summary\n%s", "a\nb")
    finally:
        logger.removeHandler(handler)

    assert second.getvalue() == lines.getvalue() == "summary\na\\nb\n"
