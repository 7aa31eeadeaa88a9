"""Figures of a benchmark, printed as a table and written to $LAKEVISION_HOME/bench/NAME.json."""

import json
import os
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from tasks.environment import lakevision_home

PACKAGES = ("prefect", "pyspark", "delta-spark", "petastorm", "torch", "horovod", "mlflow", "pyarrow")


@dataclass(frozen=True)
class Figure:
    """A figure beside that of a peer in the same run; `holds` is None without a goal."""

    figure: str
    value: float
    unit: str
    peer: str
    peer_value: float
    ratio: float
    goal: float | None
    holds: bool | None


def data_with_photos() -> Path | None:
    """Return the folder of photos and weights, or None, with a line that says so, where there is none."""
    data = os.environ.get("LAKEVISION_TEST_DATA")
    if data and (Path(data) / "photos").is_dir():
        return Path(data).resolve()
    print("LAKEVISION_TEST_DATA has no folder photos: nothing is measured", flush=True)
    return None


def medians(pairs: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Return the median of each side of pairs of rounds, and that of their ratios, which does not follow from those."""
    ours, theirs = (statistics.median(side) for side in zip(*pairs, strict=True))
    return ours, theirs, statistics.median(ours / theirs for ours, theirs in pairs)


def rate_figure(figure: str, unit: str, peer: str, pairs: Sequence[tuple[float, float]], goal: float | None) -> Figure:
    """Return the medians of pairs of rates, ours first; the goal holds where the ratio is at least as large."""
    ours, theirs, ratio = medians(pairs)
    return Figure(figure, ours, unit, peer, theirs, ratio, goal, None if goal is None else ratio >= goal)


def table(figures: list[Figure]) -> str:
    """Return the figures as a Markdown table."""
    lines = ["| figure | value | peer | peer's value | ratio | goal | holds |", "|---|---|---|---|---|---|---|"]
    for row in figures:
        goal = "" if row.goal is None else f"{row.goal:g}"
        holds = "" if row.holds is None else ("yes" if row.holds else "no")
        lines.append(
            f"| {row.figure} | {row.value:.1f} {row.unit} | {row.peer} | {row.peer_value:.1f} {row.unit} "
            f"| {row.ratio:.2f} | {goal} | {holds} |"
        )
    return "\n".join(lines)


def write_figures(name: str, figures: list[Figure], note: str) -> None:
    """Print the table, and write NAME.json, from which the README is generated."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    content = {
        "commit": commit,
        "cores": os.cpu_count(),
        "versions": {package: version(package) for package in PACKAGES},
        "note": note,
        "figures": [asdict(figure) for figure in figures],
    }
    folder = lakevision_home() / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    print(f"\n{table(figures)}\n\n{note}; {folder / f'{name}.json'}")


def read_table(file: Path) -> str:
    """Return the Markdown table and the note of a benchmark's JSON file."""
    content = json.loads(file.read_text())
    figures = [Figure(**figure) for figure in content["figures"]]
    return f"{table(figures)}\n\n{content['note']}, {content['cores']} cores, commit `{content['commit'][:8]}`."
