"""The command that starts a rank, `python -m tasks.launch.start_rank SPEC`; imports nothing heavy by itself.

So a rank ends with its parent from its first moment, and imports without the garbage collector, which would look
through objects that stay for ever, again and again: a fifth of the imports' time (LOG.md).
"""

import gc
import os
import sys
import threading
import traceback

EXIT_ORPHANED = 3


def end_with_parent() -> None:
    """End this process as soon as the one that holds the other end of stdin is gone, however it went.

    The parent never writes: the pipe closes when it ends, also by SIGKILL, and no rank is left behind.
    """

    def watch() -> None:
        sys.stdin.buffer.read()
        os._exit(EXIT_ORPHANED)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def start_rank(spec_path: str) -> int:
    """Import what a rank needs, and run it; return the process's exit status."""
    gc.disable()
    from tasks.launch.rank import main

    # Never looked through again: what comes after has collections of its own size.
    gc.freeze()
    gc.enable()
    return main(spec_path)


if __name__ == "__main__":
    end_with_parent()
    try:
        status = start_rank(sys.argv[1])
    except BaseException:  # Of the imports as of the training: the parent shows a failed rank's last lines.
        traceback.print_exc(file=sys.stdout)
        status = 1
    sys.stdout.flush()
    # Not sys.exit: the watching thread sits in a read that interpreter shutdown would wait for.
    os._exit(status)
