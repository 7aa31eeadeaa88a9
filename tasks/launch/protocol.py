"""The protocol between a rank and its launcher: events on stdout, and exit statuses."""

EVENT_MARK = "@lakevision "
"""Prefix of the lines on stdout that are events for the launcher, as JSON."""

EXIT_FAILED = 1
EXIT_WRONG_INPUT = 2
EXIT_ENDED = 130
"""Exit status after a signal, as a shell reports SIGINT."""
