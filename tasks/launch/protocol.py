"""The protocols of ranks, agents and launcher: lines of JSON, and exit statuses; uses only the standard library.

A rank sends its launcher, or the agent of its host, events on a pipe of their own. An agent and its launcher exchange
messages, objects whose `kind` is one of these:

| to the agent | fields | answer |
|---|---|---|
| prepare | spec, environment, interface | cores, interface |
| forward | port: of the launcher | port: on the agent's loopback interface |
| write, see, remove | folder, names: of files that test if the folder is shared; make: whether to create it | missing |
| take_gpus | device, backend, num_ranks: of the host | are_taken |
| release_gpus | | |
| start | rank, environment | |
| signal | rank, number | |

| from the agent | fields |
|---|---|
| hello | versions; address: by which the launcher reaches the host, or None; host: if it is not given; machine |
| answer | id: of the request; and the fields above, or error |
| line, event, activity | rank, value |
| closed | rank: one of its two pipes, for output and events, has ended |
| status | rank, value: exit status, as of subprocess |
| ending | reason: why the agent ends its ranks |

Both send `beat` every two seconds, and `open`, `data` and `close` with the number of a forwarded connection.
"""

ACTIVITY = "activity"
"""Key of the event with the fields of a rank's `Activity`; every rank sends it, once per BEAT_SECONDS."""

BEAT_SECONDS = 0.5
"""Seconds between two activities of a rank."""

EXIT_FAILED = 1
EXIT_WRONG_INPUT = 2
EXIT_ENDED = 130
"""Exit status after a signal, as a shell reports SIGINT."""
