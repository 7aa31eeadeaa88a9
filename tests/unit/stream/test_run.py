"""Work beside the batches of a stream."""

import itertools
import time

from tasks.stream.run import Paced


def test_work_beside_batches_takes_at_most_a_tenth_of_the_time() -> None:
    """It is done at once the first time, then not until nine times its duration has passed."""
    paced, done = Paced(), []

    def work() -> None:
        time.sleep(0.05)
        done.append(time.monotonic())

    began = time.monotonic()
    while time.monotonic() < began + 1.2:
        paced(work)
        time.sleep(0.005)

    assert len(done) >= 2
    assert all(later - earlier >= 0.5 for earlier, later in itertools.pairwise(done))
