"""Near-duplicates: a perceptual hash of images, and the search for similar images in different splits."""

from dataclasses import dataclass
from itertools import combinations
from math import comb

import numpy as np
import numpy.typing as npt
from PIL import Image

HASH_BITS = 64

BUCKET_NEIGHBOURS = 1000
"""Maximum number of hashes of its bucket that a hash is compared with; n nearly plain images do not take n² steps."""

MAX_EQUAL_BANDS = 5
"""Maximum number of bands of a key; with more, the keys of hashes that differ in 8 bits would be thousands."""

SORT_WORK = 3
"""Time to sort the hashes by a key, per hash, in comparisons of two hashes."""

_BITS_SET = np.array([number.bit_count() for number in range(1 << 16)], dtype=np.uint8)


def dhash(image: Image.Image) -> int:
    """Return the difference hash of an image: 64 bits as a signed integer, since Spark has no unsigned integers.

    The image is averaged down to 9x8 gray cells; a bit is set if a cell is brighter than its left neighbour.
    Scaling, compression and brightness change few bits or none (Krawetz, "Kind of Like That", 2013).
    """
    cells = np.asarray(image.convert("L").resize((9, 8), Image.Resampling.BOX))
    bits = np.packbits(cells[:, 1:] > cells[:, :-1])
    return int.from_bytes(bits.tobytes(), "big", signed=True)


def hamming_distances(first: npt.NDArray[np.uint64], second: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """Return the element-wise Hamming distances of two arrays of hashes, shape (N,)."""
    words = np.ascontiguousarray(first ^ second).view(np.uint16).reshape(-1, 4)
    distances: npt.NDArray[np.int64] = _BITS_SET[words].sum(axis=1, dtype=np.int64)
    return distances


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

    def work(self, num_hashes: int) -> float:
        """Return the estimated work per hash, in comparisons of two hashes."""
        # The last bands are the shortest, and hashes with an equal key are as frequent as among random hashes.
        key_bits = sum(mask.bit_count() for mask in self.masks()[-self.num_equal :])
        return comb(self.num_bands, self.num_equal) * (SORT_WORK + num_hashes / 2.0**key_bits / 2)


def choose_banding(num_hashes: int, max_bits: int) -> Banding:
    """Return the banding with the least work for this number of hashes.

    With keys of one band, the work grows with the square of the number of hashes. Keys of more bands are more numerous,
    and so long that few other hashes have the same.
    """
    bandings = [Banding(max_bits + num_equal, num_equal) for num_equal in range(1, MAX_EQUAL_BANDS + 1)]
    return min(bandings, key=lambda banding: banding.work(num_hashes))


def _pairs_across(counts: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """Return the number of pairs of images in different splits, of those that each row counts."""
    pairs = np.zeros(len(counts), dtype=np.int64)
    for first, second in combinations(range(counts.shape[1]), 2):
        pairs += counts[:, first].astype(np.int64) * counts[:, second]
    return pairs


@dataclass(frozen=True)
class NearDuplicates:
    """Pairs of images in different splits whose hashes are close.

    Attributes:
        num_pairs: Number of pairs of images.
        complete: Whether all pairs were counted; False if a bucket was too large to compare all its hashes.
        closest: Pairs of hashes in ascending order of distance, at most `num_listed`.
        bits: Hamming distance of each pair in `closest`.
    """

    num_pairs: int
    complete: bool
    closest: list[tuple[int, int]]
    bits: list[int]


def find_near_duplicates(
    hashes: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int32],
    max_bits: int,
    num_listed: int,
    banding: Banding | None = None,
) -> NearDuplicates:
    """Find hashes in different splits with a distance of at most `max_bits`, without comparing all pairs.

    Args:
        hashes: Distinct hashes in ascending order, shape (N,).
        counts: Number of images with the hash in each split, shape (N, number of splits).
        max_bits: Largest Hamming distance of near-duplicates.
        num_listed: Maximum length of the list of the closest pairs.
        banding: Partition of the bits, which decides the speed; by default that of `choose_banding`.
    """
    keys = hashes.view(np.uint64)
    totals = counts.sum(axis=1, dtype=np.int64)
    # Images with the same hash in different splits are pairs of distance 0.
    same_hash = _pairs_across(counts)
    num_pairs, complete = int(same_hash.sum()), True
    listed = [(0, int(hashes[at]), int(hashes[at])) for at in np.flatnonzero(same_hash)[:num_listed]]
    del same_hash  # the search needs the memory
    banding = banding or choose_banding(len(hashes), max_bits)
    bands = [np.uint64(mask) for mask in banding.masks()]
    for key in combinations(range(banding.num_bands), banding.num_equal):
        mask = np.bitwise_or.reduce([bands[band] for band in key])
        # A pair is counted only with the first key in which its hashes are equal.
        earlier = [bands[band] for band in range(max(key)) if band not in key]
        order = np.argsort(keys & mask, kind="stable")
        bucket = keys[order] & mask
        starts = np.flatnonzero(bucket[1:] == bucket[:-1])
        for step in range(1, BUCKET_NEIGHBOURS + 2):
            if step > 1:
                starts = starts[starts + step < len(order)]
                starts = starts[bucket[starts] == bucket[starts + step]]
            if not len(starts):
                break
            if step > BUCKET_NEIGHBOURS:
                complete = False
                break
            left, right = order[starts], order[starts + step]
            distances = hamming_distances(keys[left], keys[right])
            different = keys[left] ^ keys[right]
            first = np.all([different & band != 0 for band in earlier], axis=0)
            across = totals[left] * totals[right] - (counts[left].astype(np.int64) * counts[right]).sum(axis=1)
            near = np.flatnonzero((distances <= max_bits) & first & (across > 0))
            num_pairs += int(across[near].sum())
            best = near[np.lexsort((right[near], left[near], distances[near]))[:num_listed]]
            listed += [(int(distances[at]), int(hashes[left[at]]), int(hashes[right[at]])) for at in best]
        listed = sorted(listed)[:num_listed]
    return NearDuplicates(
        num_pairs, complete, [(first, second) for _, first, second in listed], [bits for bits, _, _ in listed]
    )
