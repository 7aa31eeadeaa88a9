"""The protocol between a rank and its launcher: events as lines of JSON on a pipe of their own, and exit statuses."""

ACTIVITY = "activity"
"""Key of the event with the fields of a rank's `Activity`; every rank sends it, once per BEAT_SECONDS."""

BEAT_SECONDS = 0.5
"""Seconds between two activities of a rank."""

EXIT_FAILED = 1
EXIT_WRONG_INPUT = 2
EXIT_ENDED = 130
"""Exit status after a signal, as a shell reports SIGINT."""
