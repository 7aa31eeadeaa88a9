"""Progress bars on a terminal."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.theme import Theme

from tasks.progress.count import Standing, heard_by


@contextmanager
def progress_bars(console: Console) -> Iterator[None]:
    """Show a bar for each step meanwhile, where stderr is a terminal; elsewhere the log's lines are all there is.

    Args:
        console: Writes to stderr; lines that it prints meanwhile go above the bars.
    """
    if not sys.stderr.isatty():
        yield
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[standing]}"))
    bars: dict[str, TaskID] = {}
    # Prefect's console has styles of its own alone, and none for a bar.
    with console.use_theme(Theme()), Progress(*columns, console=console, redirect_stdout=False) as progress:

        def show(standing: Standing) -> None:
            if standing.step not in bars:
                bars[standing.step] = progress.add_task(standing.step, total=standing.total, standing="")
            bar = bars[standing.step]
            progress.update(bar, completed=standing.done, total=standing.total, standing=str(standing))

        with heard_by(show):
            yield
