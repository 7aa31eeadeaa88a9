"""Answers as people read them: the artifact of a run with thumbnails, and the table and next command of a terminal."""

from rich.cells import cell_len

from tasks.commands import flow_command
from tasks.config.prediction import PredictRun, StreamRun
from tasks.errors import join_names
from tasks.predict.champion import NUM_NAMED
from tasks.refs import PredictReport, StreamReport
from tasks.text.markup import markdown_code, markdown_table, markdown_text, printable

NUM_FAILED_SHOWN = 20
"""Number of failed files in a terminal and on the page; the JSON of the run has more, and the CSV file all."""


def about_answers(report: PredictReport | StreamReport) -> str:
    """Return the description of the artifact."""
    about = (
        f"The least confident predictions by {markdown_text(report.model.name)} version {report.model.version}; all "
        f"predictions are in `{report.predictions.path}` version {report.predictions.version}"
    )
    if isinstance(report, PredictReport) and report.inputs:
        about += f", their files in `{report.inputs.path}`"
    if report.unreadable:
        about += f". {report.unreadable} files cannot be read"
    if report.unlearned:
        named = join_names(list(report.unlearned[:NUM_NAMED]), len(report.unlearned))
        about += f". The model was trained without {markdown_text(named)}, whose images get other labels"
    return about


def answers_markdown(report: PredictReport | StreamReport) -> str:
    """Return the artifact: the least confident predictions with thumbnails, then the failed files."""
    parts = []
    if report.csv:
        parts.append(f"{_counts(report)}: {markdown_code(report.csv)} has a row for each of the {report.num_files}.")
    if report.least_confident:
        rows = [
            [
                f"![]({image.thumbnail})" if image.thumbnail else "",
                markdown_text(image.label),
                f"{image.probability:.4f}",
                "" if image.unknown_score is None else f"{image.unknown_score:.4f}",
                markdown_text(image.path),
            ]
            for image in report.least_confident
        ]
        parts += ["## Least sure", markdown_table(["image", "label", "probability", "unknown score", "file"], rows)]
    if report.failed:
        rows = [[markdown_text(file.path), markdown_text(file.error)] for file in report.failed[:NUM_FAILED_SHOWN]]
        parts += [_failed_title(report, "## "), markdown_table(["file", "error"], rows)]
    return "\n\n".join(parts) or "No file was predicted yet."


def _counts(report: PredictReport | StreamReport) -> str:
    others = f", {report.num_ignored} other files ignored" if report.num_ignored else ""
    return f"{report.num_files} files, {report.num_failed} of them failed{others}"


def _failed_title(report: PredictReport | StreamReport, mark: str = "") -> str:
    shown = min(len(report.failed), NUM_FAILED_SHOWN)
    return f"{mark}Failed: {report.num_failed}" + (f", the first {shown}" if shown < report.num_failed else "")


def answers_text(report: PredictReport | StreamReport, config: PredictRun | StreamRun) -> str:
    """Return the end of a run in a terminal: the least sure images, failed files, the CSV file and the next command.

    Args:
        report: The report of the run.
        config: Its parameters, which the command repeats.
    """
    lines = []
    if report.least_confident:
        least = [(f"{image.probability:.4f}", image.label, image.path) for image in report.least_confident]
        model = f"{report.model.name} version {report.model.version}"
        lines += [f"Least sure, by {printable(model)}:", *_aligned([("probability", "label", "file"), *least]), ""]
    if report.failed:
        failed = [(file.path, file.error) for file in report.failed[:NUM_FAILED_SHOWN]]
        lines += [f"{_failed_title(report)}:", *_aligned([("file", "error"), *failed]), ""]
    if report.csv:
        lines.append(f"all answers  {printable(report.csv)} ({_counts(report)})")
    lines.append(f"next         {next_command(config)}")
    return "\n".join(lines)


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """Return the lines of a table; names in scripts with wide characters keep its columns straight."""
    cells = [[printable(text) for text in row] for row in rows]
    widths = [max(cell_len(row[place]) for row in cells) for place in range(len(cells[0]))]
    return [
        "  "
        + "  ".join(text + " " * (width - cell_len(text)) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]


def next_command(config: PredictRun | StreamRun) -> str:
    """Return the command that predicts new images as they come, with the tables, model and source of this run."""
    given = config.model_dump(include={"storage", "promote", "predict", "spark"}, exclude_defaults=True)
    # Not those of the run itself: a stream has no version of a table, and errors are predicted again once.
    given.get("predict", {}).pop("table_version", None)
    given.get("predict", {}).pop("retry_errors", None)
    options = [
        text
        for group, values in given.items()
        for name, value in values.items()
        if isinstance(value, str | int | float)
        for text in (f"--{group}.{name}", str(value))
    ]
    return f"{flow_command('predict_stream', *options, '--interval_seconds', '30')}   (new images as they come)"
