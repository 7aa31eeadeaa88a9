"""Threads of a service that repeat a piece of work until they are ended."""

import logging
import threading
from collections.abc import Callable

from tasks.errors import UserError

logger = logging.getLogger("lakevision.serve")


class Repeated(threading.Thread):
    """Work that is repeated beside other threads; a failure is logged, and the work is tried again."""

    def __init__(self, name: str, seconds: float, work: Callable[[], object], *, once_more: bool = False) -> None:
        """Prepare the thread.

        Args:
            name: Its name, which begins the log lines of failures.
            seconds: Time from the end of the work to its next beginning.
            work: The work; any error that it raises is logged.
            once_more: Whether `end` does the work once more.
        """
        super().__init__(name=name, daemon=True)
        self._seconds, self._work, self._once_more = seconds, work, once_more
        self._ended, self._said = threading.Event(), ""

    def run(self) -> None:
        """Work until `end`, first at once."""
        self._attempt()
        while not self._ended.wait(self._seconds):
            self._attempt()

    def _attempt(self) -> None:
        try:
            self._work()
            self._said = ""
        except Exception as error:
            # A registry, store or disk that is away fails each time: said once, and with the next other reason.
            if (text := f"{type(error).__name__}: {error}") != self._said:
                logger.warning("%s: %s", self.name, text, exc_info=not isinstance(error, UserError))
                self._said = text

    def end(self) -> None:
        """End the thread after the work that it does now, and work once more if that is asked for."""
        self._ended.set()
        self.join()
        if self._once_more:
            self._attempt()
