"""The command that starts a rank, `python -m tasks.launch.start_rank DESCRIPTOR SPEC`; events go to the descriptor.

It imports only the standard library at first, so that from the beginning the rank exits with its parent. The imports of
a rank run without the garbage collector, whose repeated scans of long-lived objects take a fifth of the time (LOG.md).
"""

import ctypes
import faulthandler
import gc
import os
import signal
import sys
import threading
import traceback

from tasks.launch.protocol import Reporter
from tasks.progress.start_clock import process_start

EXIT_ORPHANED = 3
PR_SET_PDEATHSIG = 1
"""The option of prctl(2) that names the signal a process gets when its parent ends."""


def end_with_parent() -> None:
    """Exit as soon as the parent process, which has the other end of stdin, has ended.

    The parent never writes. The pipe closes when the parent ends, even by SIGKILL, so that no rank is orphaned. A
    stopped rank cannot read: Linux sends it SIGKILL, which ends stopped processes as well, at the end of the thread
    that started it. In all launchers that thread waits for the rank.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        sys.stdin.buffer.read()
        os._exit(EXIT_ORPHANED)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def start_rank(reporter: Reporter, spec_path: str) -> int:
    """Import the modules of a rank and run it; return the exit status of the process."""
    gc.disable()
    from tasks.launch.rank import main

    # Excludes the imported objects, which stay until the end, from all later collections.
    gc.freeze()
    gc.enable()
    process_start.passed("imports")
    return main(spec_path, reporter.send)


if __name__ == "__main__":
    process_start.begin()
    end_with_parent()
    # Native code that crashes shows where it was called. One thread: the launcher keeps a few last lines.
    faulthandler.enable(file=sys.stdout, all_threads=False)
    faulthandler.register(signal.SIGUSR1, file=sys.stdout)
    own = Reporter(int(sys.argv[1]))
    own.start()
    try:
        status = start_rank(own, sys.argv[2])
    except BaseException:  # Also of the imports: the parent shows the last lines of a failed rank.
        traceback.print_exc(file=sys.stdout)
        status = 1
    sys.stdout.flush()
    # Not sys.exit: interpreter shutdown would wait for the read of the watching thread.
    os._exit(status)
