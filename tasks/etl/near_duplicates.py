"""Near-duplicates: the search for similar images in different splits, by their perceptual hashes."""

import operator
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import reduce
from itertools import combinations
from math import comb

import numpy as np
import numpy.typing as npt

from tasks.system.cores import num_cores

HASH_BITS = 64

BUCKET_NEIGHBOURS = 1000
"""Maximum number of hashes of its bucket that a hash is compared with; n nearly plain images do not take n² steps."""

MAX_EQUAL_BANDS = 5
"""Maximum number of bands of a key; with more, the keys of hashes that differ in 8 bits would be thousands."""

KEY_WORK = 3
"""Time of the passes over the hashes for a key, per hash, in comparisons of two hashes."""

CHUNK = 1 << 18
"""Number of hashes worked on at once: few enough that arrays of them stay in the cache of the processor."""

MAX_TABLE_BITS = 24
"""Logarithm of the largest number of slots of a table of hashes, which takes 64 MB."""

MAX_THREADS = 2
"""Keys searched at the same time; each takes 64 MB, and 8 bytes per hash."""

SPREAD = np.uint64(0x9E3779B97F4A7C15)
"""Odd multiplier that spreads the bits of a key over the highest bits (Knuth, The Art of Computer Programming, 6.4)."""


@dataclass(frozen=True)
class Banding:
    """Partition of the 64 bits into bands, and keys of several bands in which close hashes are equal.

    Hashes that differ in at most `max_bits` bits differ in at most as many bands, and are equal in all others.

    Attributes:
        num_bands: Number of bands.
        num_equal: Number of bands of a key, and least number of bands in which two close hashes are equal.
    """

    num_bands: int
    num_equal: int

    def masks(self) -> list[int]:
        """Return the bits of each band.

        They are spread over the image: neighbouring bits are correlated and would fill few buckets.
        """
        return [sum(1 << bit for bit in range(band, HASH_BITS, self.num_bands)) for band in range(self.num_bands)]

    def key_masks(self) -> Iterator[tuple[np.uint64, list[np.uint64]]]:
        """Yield the bits of each key, and the bands that differ in a pair of hashes unless an earlier key has it."""
        bands = [np.uint64(mask) for mask in self.masks()]
        for key in combinations(range(self.num_bands), self.num_equal):
            others = [bands[band] for band in range(max(key)) if band not in key]
            yield reduce(operator.or_, [bands[band] for band in key]), others

    def work(self, num_hashes: int) -> float:
        """Return the estimated work per hash, in comparisons of two hashes."""
        # The last bands are the shortest, and hashes with an equal key are as frequent as among random hashes.
        key_bits = sum(mask.bit_count() for mask in self.masks()[-self.num_equal :])
        return comb(self.num_bands, self.num_equal) * (KEY_WORK + num_hashes / 2.0**key_bits / 2)


def choose_banding(num_hashes: int, max_bits: int) -> Banding:
    """Return the banding with the least work for this number of hashes.

    With keys of one band, the work grows with the square of the number of hashes. Keys of more bands are more numerous,
    and so long that few other hashes have the same.
    """
    bandings = [Banding(max_bits + num_equal, num_equal) for num_equal in range(1, MAX_EQUAL_BANDS + 1)]
    return min(bandings, key=lambda banding: banding.work(num_hashes))


@dataclass(frozen=True)
class NearDuplicates:
    """Pairs of images in different splits whose hashes are close.

    Attributes:
        num_pairs: Number of pairs of images.
        complete: Whether all pairs were counted; False if a bucket was too large to compare all its hashes.
        closest: Hamming distance and hashes of the closest pairs of hashes in ascending order, at most `num_listed`.
    """

    num_pairs: int
    complete: bool
    closest: list[tuple[int, int, int]]


def _pairs_by_key(
    hashes: npt.NDArray[np.uint64], key: np.uint64
) -> Iterator[tuple[int, npt.NDArray[np.uint32], npt.NDArray[np.uint32]]]:
    """Yield the pairs of hashes that are equal in the bits of a key, each once.

    Every hash writes its place into a table, at a slot that follows from its key. Those that do not find their own
    place there afterwards are a pair with the hash that they find. They do the same without it until none is left.

    Yields:
        The number of hashes that each of these was compared with so far, and the places of both hashes of each pair.
    """
    num_bits = min(max(1, len(hashes).bit_length()), MAX_TABLE_BITS)
    shift = np.uint64(HASH_BITS - num_bits)
    table = np.zeros(1 << num_bits, dtype=np.uint32)

    def slots_of(places: npt.NDArray[np.uint32]) -> npt.NDArray[np.int64]:
        # NumPy would convert indices of another type; so few bits have the same value with a sign.
        return (((hashes.take(places) & key) * SPREAD) >> shift).view(np.int64)

    remaining = np.arange(len(hashes), dtype=np.uint32)
    round_number = 0
    while len(remaining):
        round_number += 1
        chunks = [remaining[begin : begin + CHUNK] for begin in range(0, len(remaining), CHUNK)]
        for places in chunks:
            table[slots_of(places)] = places
        others = []
        for places in chunks:
            found = table.take(slots_of(places))
            is_other = np.flatnonzero(found != places)
            first, second = places[is_other], found[is_other]
            others.append(first)
            equal = (hashes.take(first) ^ hashes.take(second)) & key == 0
            yield round_number, first[equal], second[equal]
        remaining = np.concatenate(others)


def _search_key(
    hashes: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int32],
    max_bits: int,
    num_listed: int,
    key: np.uint64,
    earlier: list[np.uint64],
) -> tuple[int, bool, list[tuple[int, int, int]]]:
    """Return the number of pairs of images found with a key, whether these are all, and the closest pairs of hashes."""
    keys, num_pairs = hashes.view(np.uint64), 0
    listed: list[tuple[int, int, int]] = []
    for compared, first, second in _pairs_by_key(keys, key):
        if compared > BUCKET_NEIGHBOURS and len(first):
            return num_pairs, False, listed
        near = np.bitwise_count(keys[first] ^ keys[second]) <= max_bits
        left, right = first[near], second[near]
        for band in earlier:  # A pair is counted only with the first key in which its hashes are equal.
            is_first = (keys[left] ^ keys[right]) & band != 0
            left, right = left[is_first], right[is_first]
        in_left, in_right = counts[left].astype(np.int64), counts[right].astype(np.int64)
        across = in_left.sum(axis=1) * in_right.sum(axis=1) - (in_left * in_right).sum(axis=1)
        num_pairs += int(across.sum())
        left, right = left[across > 0], right[across > 0]
        distances = np.bitwise_count(keys[left] ^ keys[right])
        pairs = np.sort([hashes[left], hashes[right]], axis=0)
        best = np.lexsort((pairs[1], pairs[0], distances))[:num_listed]
        found = [(int(distances[at]), int(pairs[0, at]), int(pairs[1, at])) for at in best]
        listed = sorted([*listed, *found])[:num_listed]
    return num_pairs, True, listed


def components(
    first: npt.NDArray[np.integer], second: npt.NDArray[np.integer], num_nodes: int
) -> npt.NDArray[np.int32]:
    """Return the number of the connected component of each node, shape (num_nodes,); edges have shape (E,)."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    edges = coo_array((np.ones(len(first), np.int8), (first, second)), shape=(num_nodes, num_nodes))
    found: npt.NDArray[np.int32] = connected_components(edges, directed=False)[1]
    return found


def cluster_hashes(hashes: npt.NDArray[np.int64], max_bits: int) -> tuple[npt.NDArray[np.int32], bool]:
    """Return the number of each hash's cluster, and whether all close hashes were found.

    Two hashes with a distance of at most `max_bits` are in one cluster, and so are those that others connect.

    Args:
        hashes: Distinct hashes, shape (N,).
        max_bits: Largest Hamming distance of near-duplicates.
    """
    keys, complete = hashes.view(np.uint64), True
    clusters = np.arange(len(hashes), dtype=np.int32)
    for key, _ in choose_banding(len(hashes), max_bits).key_masks():
        for compared, first, second in _pairs_by_key(keys, key):
            if compared > BUCKET_NEIGHBOURS and len(first):
                complete = False
                break
            # A pair within a cluster changes nothing: many nearly plain images are joined in a few rounds.
            apart = clusters[first] != clusters[second]
            left, right = first[apart], second[apart]
            near = np.bitwise_count(keys[left] ^ keys[right]) <= max_bits
            if near.any():
                joined = components(clusters[left[near]], clusters[right[near]], len(hashes))
                clusters = joined[clusters]
    return clusters, complete


def find_near_duplicates(
    hashes: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int32],
    max_bits: int,
    num_listed: int,
    banding: Banding | None = None,
) -> NearDuplicates:
    """Find hashes in different splits with a distance of at most `max_bits`, without comparing all pairs.

    Args:
        hashes: Distinct hashes, shape (N,).
        counts: Number of images with the hash in each split, shape (N, number of splits).
        max_bits: Largest Hamming distance of near-duplicates.
        num_listed: Maximum length of the list of the closest pairs.
        banding: Partition of the bits, which decides the speed; by default that of `choose_banding`.
    """
    # Images with the same hash in different splits are pairs of distance 0; the square counts each of them twice.
    same_hash = counts.sum(axis=1, dtype=np.int64) ** 2
    same_hash -= np.einsum("ij,ij->i", counts, counts, dtype=np.int64)
    same_hash //= 2
    num_pairs, complete = int(same_hash.sum()), True
    listed = [(0, int(found), int(found)) for found in np.sort(hashes[same_hash > 0])[:num_listed]]
    del same_hash  # the search needs the memory
    banding = banding or choose_banding(len(hashes), max_bits)
    # NumPy works on arrays without Python's lock.
    with ThreadPoolExecutor(min(num_cores(), MAX_THREADS)) as threads:
        for pairs, is_complete, closest in threads.map(
            lambda key: _search_key(hashes, counts, max_bits, num_listed, *key), banding.key_masks()
        ):
            num_pairs, complete = num_pairs + pairs, complete and is_complete
            listed = sorted([*listed, *closest])[:num_listed]
    return NearDuplicates(num_pairs, complete, listed)
