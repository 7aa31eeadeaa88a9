"""Virtual ranks: the ranks for which a training run is configured, dealt to those that run."""

from dataclasses import dataclass


@dataclass(frozen=True)
class VirtualRanks:
    """The virtual ranks of a training run, and this rank's part of them.

    A run that has lost ranks continues with fewer. Each takes the batches of one or more virtual ranks and accumulates
    their gradients. Batches, images per step and random numbers stay as they were. Or et al., "VirtualFlow" (2022,
    section 3), call them virtual nodes. Without a loss each rank is its own virtual rank.

    All ranks take the same number of batches. A rank with fewer virtual ranks than others begins with an empty batch.
    So the last batch of a step, whose backward pass averages the gradients, has images.
    """

    rank: int = 0
    """This rank."""
    num_ranks: int = 1
    """Number of ranks that run."""
    num_virtual: int = 1
    """Number of virtual ranks, `distributed.num_ranks`; at least that of the ranks."""

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.num_ranks <= self.num_virtual, f"{self} is not a part of the virtual ranks"

    @classmethod
    def of(cls, rank: int, num_ranks: int, num_virtual: int | None = None) -> "VirtualRanks":
        """Return a rank's part; without `num_virtual`, each rank is its own virtual rank."""
        return cls(rank, num_ranks, num_ranks if num_virtual is None else num_virtual)

    @property
    def num_turns(self) -> int:
        """Number of turns in which all virtual ranks have had a batch; in each, a rank takes one batch."""
        return -(-self.num_virtual // self.num_ranks)

    def held_by(self, rank: int) -> range:
        """Return the virtual ranks of a rank; adjacent ones, since they read adjacent row groups."""
        begin, end = (self.num_virtual * number // self.num_ranks for number in (rank, rank + 1))
        return range(begin, end)

    @property
    def own(self) -> range:
        """The virtual ranks of this rank."""
        return self.held_by(self.rank)

    def holder(self, virtual: int) -> int:
        """Return the rank that has a virtual rank."""
        return ((virtual + 1) * self.num_ranks - 1) // self.num_virtual

    def at(self, turn: int, rank: int | None = None) -> int | None:
        """Return the virtual rank whose batch a rank takes in a turn, or None for an empty batch."""
        held = self.held_by(self.rank if rank is None else rank)
        number = turn - (self.num_turns - len(held))
        return held[number] if number >= 0 else None
