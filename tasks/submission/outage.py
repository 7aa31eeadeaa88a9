"""An outage of the Prefect server during the wait for a submitted run, which is waited out."""

import logging
import time
from collections.abc import Callable

from tasks.errors import TimeLimitExceeded

logger = logging.getLogger("lakevision.pool")


class Outage:
    """The periods in which the server does not answer: one warning for each, and one line when it is over."""

    def __init__(self, what: str, limit: tuple[str, int], clock: Callable[[], float] = time.monotonic) -> None:
        """Start without an outage.

        Args:
            what: What continues meanwhile, for the warning.
            limit: Name of the setting that limits the duration of an outage, and its value in seconds.
            clock: Returns the time in seconds.
        """
        self._what = what
        self._limit = limit
        self._clock = clock
        self._since: float | None = None

    def note(self, error: Exception) -> None:
        """Note a request that was not answered.

        Raises:
            TimeLimitExceeded: The outage has lasted longer than its limit.
        """
        if self._since is not None:
            setting, seconds = self._limit
            if (duration := self._clock() - self._since) > seconds:
                raise TimeLimitExceeded(
                    f"the Prefect server has not answered for {duration:.0f} s ({error}), longer than {setting} "
                    f"{seconds}: start it, and run again"
                )
            return
        self._since = self._clock()
        logger.warning("the Prefect server does not answer (%s): waiting until it does; %s", error, self._what)

    def end(self) -> bool:
        """Note a request that was answered, and return whether an outage ends with it."""
        if self._since is None:
            return False
        logger.warning("the Prefect server answers again, after %.0f s", self._clock() - self._since)
        self._since = None
        return True
