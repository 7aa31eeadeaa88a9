"""Near-duplicates: a perceptual hash of images, and the search for similar images in different splits."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image

HASH_BITS = 64

BUCKET_NEIGHBOURS = 1000
"""Maximum number of hashes of its bucket that a hash is compared with; n nearly plain images do not take n² steps."""

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


def _bands(max_bits: int) -> list[np.uint64]:
    """Return masks that partition the 64 bits into max_bits + 1 bands.

    Two hashes that differ in at most max_bits bits are equal in at least one band. The bits of a band are spread over
    the image: neighbouring bits are correlated and would fill few buckets.
    """
    count = max_bits + 1
    return [np.uint64(sum(1 << bit for bit in range(band, HASH_BITS, count))) for band in range(count)]


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
    hashes: npt.NDArray[np.int64], counts: npt.NDArray[np.int64], max_bits: int, num_listed: int
) -> NearDuplicates:
    """Find hashes in different splits with a distance of at most `max_bits`, without comparing all pairs.

    Args:
        hashes: Distinct hashes, shape (N,).
        counts: Number of images with the hash in each split, shape (N, number of splits).
        max_bits: Largest Hamming distance of near-duplicates.
        num_listed: Maximum length of the list of the closest pairs.
    """
    keys = hashes.astype(np.int64).view(np.uint64)
    totals = counts.sum(axis=1)
    # Images with the same hash in different splits are pairs of distance 0.
    same_hash = (totals**2 - (counts**2).sum(axis=1)) // 2
    num_pairs, complete = int(same_hash.sum()), True
    listed = [(0, int(hashes[at]), int(hashes[at])) for at in np.flatnonzero(same_hash)[:num_listed]]
    bands = _bands(max_bits)
    for number, band in enumerate(bands):
        order = np.argsort(keys & band, kind="stable")
        bucket = keys[order] & band
        starts = np.arange(len(order))
        for step in range(1, BUCKET_NEIGHBOURS + 2):
            starts = starts[starts + step < len(order)]
            starts = starts[bucket[starts] == bucket[starts + step]]
            if not len(starts):
                break
            if step > BUCKET_NEIGHBOURS:
                complete = False
                break
            left, right = order[starts], order[starts + step]
            distances = hamming_distances(keys[left], keys[right])
            # A pair is counted only in the first band in which its hashes are equal.
            first = np.all([(keys[left] ^ keys[right]) & earlier != 0 for earlier in bands[:number]], axis=0)
            across = totals[left] * totals[right] - (counts[left] * counts[right]).sum(axis=1)
            near = np.flatnonzero((distances <= max_bits) & first & (across > 0))
            num_pairs += int(across[near].sum())
            best = near[np.argsort(distances[near], kind="stable")[:num_listed]]
            listed += [(int(distances[at]), int(hashes[left[at]]), int(hashes[right[at]])) for at in best]
        listed = sorted(listed)[:num_listed]
    return NearDuplicates(
        num_pairs, complete, [(first, second) for _, first, second in listed], [bits for bits, _, _ in listed]
    )
