"""Progress bars on a terminal."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.theme import Theme

from tasks.progress.count import StepProgress, listener


@contextmanager
def progress_bars(console: Console) -> Iterator[None]:
    """Show a progress bar for each step within the context; has no effect where stderr is not a terminal.

    Args:
        console: Console on stderr; lines that it prints meanwhile appear above the bars.
    """
    if not sys.stderr.isatty():
        yield
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[status]}"))
    bars: dict[str, TaskID] = {}
    # The theme of Prefect's console has no styles for progress bars.
    with console.use_theme(Theme()), Progress(*columns, console=console, redirect_stdout=False) as progress:

        def show(update: StepProgress) -> None:
            if update.step not in bars:
                bars[update.step] = progress.add_task(update.step, total=update.total, status="")
            bar = bars[update.step]
            progress.update(bar, completed=update.done, total=update.total, status=str(update))

        with listener(show):
            yield
