"""The decision which rank has stalled, from activities at given times."""

from tasks.launch.watchdog import PAUSE_SECONDS, START_SECONDS, WORK_SECONDS, Stall, Watchdog
from tasks.progress.activity import Activity, Kind

STALL = 20.0


class Ranks:
    """Ranks that report their activities every half second, as a rank's thread does."""

    def __init__(self, num_ranks: int) -> None:
        self.watchdog = Watchdog(num_ranks, STALL, now=0.0)
        self.now = 0.0
        self.activities = {rank: Activity("starting", "start") for rank in range(num_ranks)}

    def change(self, rank: int, name: str, kind: Kind, epoch: int | None = None, step: int | None = None) -> None:
        """Change the activity of a rank."""
        self.activities[rank] = Activity(name, kind, epoch, step, self.activities[rank].changes + 1)

    def pass_time(self, seconds: float, silent: tuple[int, ...] = ()) -> Stall | None:
        """Let time pass, in which all ranks but the silent ones report; return the first stall."""
        until = self.now + seconds
        while self.now < until:
            self.now += 0.5
            for rank, activity in self.activities.items():
                if rank not in silent:
                    self.watchdog.on_activity(rank, activity, self.now)
            if (stall := self.watchdog.find_stall(self.now)) is not None:
                return stall
        return None


def training(num_ranks: int = 2) -> Ranks:
    """Return ranks in step 14 of epoch 2."""
    ranks = Ranks(num_ranks)
    for rank in range(num_ranks):
        ranks.change(rank, "training", "step", 2, 14)
    assert ranks.pass_time(1) is None
    return ranks


def test_stopped_rank_is_blamed_and_not_the_one_that_waits_for_it() -> None:
    """A rank that reports nothing has stalled after the limit; the sentence has its number, step and epoch."""
    ranks = training()
    ranks.change(0, "training", "ranks", 2, 14)

    assert ranks.pass_time(STALL - 1, silent=(1,)) is None
    stall = ranks.pass_time(5, silent=(1,))

    assert stall == Stall((1,), "rank 1 has reported nothing for 20 s, since step 14 of epoch 2 (training)")


def test_rank_in_an_endless_loop_is_blamed() -> None:
    """Its thread still reports, but always the same step."""
    ranks = training()
    ranks.change(0, "training", "ranks", 2, 14)

    stall = ranks.pass_time(2 * STALL)

    assert stall == Stall((1,), "rank 1 has made no progress for 20 s, in step 14 of epoch 2 (training)")


def test_rank_that_stops_while_it_waits_in_a_collective_is_blamed() -> None:
    """Its last report was that it waits, and the other ranks then wait for it."""
    ranks = training()
    for rank in (0, 1):
        ranks.change(rank, "training", "ranks", 2, 15)

    stall = ranks.pass_time(2 * STALL, silent=(1,))

    assert stall is not None
    assert stall.ranks == (1,)


def test_stopped_rank_is_blamed_if_others_hang_in_their_own_steps_for_it() -> None:
    """With a backend whose collective operations are within the backward pass, waiting ranks report the same step."""
    ranks = training(3)

    assert ranks.pass_time(0.5, silent=(2,)) is None
    ranks.activities[0] = ranks.activities[0]._replace(step=13)
    stall = ranks.pass_time(2 * STALL, silent=(2,))

    assert stall is not None
    assert stall.ranks == (2,)


def test_rank_furthest_behind_is_blamed() -> None:
    """Of several ranks without progress, the one with the least epoch and step is the cause."""
    ranks = training(3)
    ranks.change(0, "training", "step", 2, 15)
    ranks.change(2, "training", "step", 3, 0)

    stall = ranks.pass_time(2 * STALL)

    assert stall is not None
    assert stall.ranks == (1,)


def test_waiting_for_a_rank_that_works_is_no_stall() -> None:
    """Ranks wait as long as another one takes steps, logs results, or waits for another process."""
    ranks = training()
    ranks.change(0, "computing features", "ranks", 2)
    for step in range(100):
        ranks.change(1, "computing features", "step", 2, step)
        assert ranks.pass_time(STALL - 2) is None

    ranks.change(1, "waiting for another process", "processes")
    assert ranks.pass_time(10 * WORK_SECONDS) is None

    ranks.change(1, "logging the results", "work")
    assert ranks.pass_time(WORK_SECONDS - 2) is None
    stall = ranks.pass_time(10)
    assert stall == Stall((1,), "rank 1 has made no progress for 3600 s, in 'logging the results'")


def test_ranks_that_wait_for_each_other_have_stalled() -> None:
    """Ranks in different collective operations wait forever; the one furthest behind is named."""
    ranks = training()
    ranks.change(0, "training", "ranks", 2, 15)
    ranks.change(1, "training", "ranks", 2, 14)

    stall = ranks.pass_time(10 * STALL)

    assert stall == Stall((1,), "rank 1 has waited for other ranks for 60 s, in step 14 of epoch 2 (training)")


def test_slow_start_is_no_stall() -> None:
    """Imports may keep a rank from reporting for longer than the limit."""
    ranks = Ranks(2)
    assert ranks.pass_time(START_SECONDS - 1, silent=(0, 1)) is None
    stall = ranks.pass_time(5, silent=(0, 1))
    assert stall is not None
    assert stall.ranks == (0, 1)


def test_ranks_get_their_time_again_after_the_launcher_was_stopped() -> None:
    """A suspended machine stops launcher and ranks together."""
    ranks = training()

    ranks.now += 10 * STALL

    assert ranks.now > PAUSE_SECONDS
    assert ranks.watchdog.find_stall(ranks.now) is None
    assert ranks.pass_time(STALL - 2) is None
    assert ranks.pass_time(5) is not None


def test_ended_rank_is_not_watched() -> None:
    """The other ranks may take their time to end, too."""
    ranks = training()
    ranks.watchdog.ended(1)
    ranks.change(0, "logging the results", "work")

    assert ranks.pass_time(2 * STALL, silent=(1,)) is None
