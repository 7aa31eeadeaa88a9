"""Near-duplicates: a perceptual hash of every image, and the pairs of images in different splits that are close."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image

HASH_BITS = 64

BUCKET_NEIGHBOURS = 1000
"""With how many others of its bucket a hash is compared at most, so that n nearly plain images are not n-squared."""

_BITS_SET = np.array([number.bit_count() for number in range(1 << 16)], dtype=np.uint8)


def dhash(image: Image.Image) -> int:
    """Return the difference hash of an image: 64 bits as a signed integer, since Spark has no unsigned one.

    The image is averaged down to 9x8 gray cells; each bit says whether a cell is brighter than its left neighbour.
    Scaling, compression and brightness change few bits or none (Krawetz, "Kind of Like That", 2013).
    """
    cells = np.asarray(image.convert("L").resize((9, 8), Image.Resampling.BOX))
    bits = np.packbits(cells[:, 1:] > cells[:, :-1])
    return int.from_bytes(bits.tobytes(), "big", signed=True)


def bits_apart(first: npt.NDArray[np.uint64], second: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """Return the Hamming distance of hashes, element by element."""
    words = np.ascontiguousarray(first ^ second).view(np.uint16).reshape(-1, 4)
    apart: npt.NDArray[np.int64] = _BITS_SET[words].sum(axis=1, dtype=np.int64)
    return apart


def _bands(max_bits: int) -> list[np.uint64]:
    """Return masks that part the 64 bits into max_bits + 1 bands.

    Two hashes that differ in at most max_bits bits agree in one band at least. Each takes its bits from all over the
    image, since neighbouring bits say much the same and would fill few buckets.
    """
    count = max_bits + 1
    return [np.uint64(sum(1 << bit for bit in range(band, HASH_BITS, count))) for band in range(count)]


@dataclass(frozen=True)
class NearDuplicates:
    """Pairs of images in different splits whose hashes are close.

    Attributes:
        num_pairs: How many pairs of images.
        complete: Whether all were counted; False where a bucket was too large to compare everything in it.
        closest: Pairs of hashes, the closest first, at most as many as were asked for.
        bits: In how many bits each of `closest` differs.
    """

    num_pairs: int
    complete: bool
    closest: list[tuple[int, int]]
    bits: list[int]


def find_near_duplicates(
    hashes: npt.NDArray[np.int64], counts: npt.NDArray[np.int64], max_bits: int, num_listed: int
) -> NearDuplicates:
    """Find hashes at most `max_bits` apart that occur in different splits, without comparing all with all.

    Args:
        hashes: Distinct hashes, shape (N,).
        counts: How many images of each split have the hash, shape (N, number of splits).
        max_bits: Largest Hamming distance that counts as near.
        num_listed: Length of the list of the closest pairs.
    """
    keys = hashes.astype(np.int64).view(np.uint64)
    totals = counts.sum(axis=1)
    # One hash in two splits is a pair with itself.
    alone = (totals**2 - (counts**2).sum(axis=1)) // 2
    num_pairs, complete = int(alone.sum()), True
    listed = [(0, int(hashes[at]), int(hashes[at])) for at in np.flatnonzero(alone)[:num_listed]]
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
            apart = bits_apart(keys[left], keys[right])
            # Of the bands in which two hashes agree the first one counts the pair.
            first = np.all([(keys[left] ^ keys[right]) & earlier != 0 for earlier in bands[:number]], axis=0)
            across = totals[left] * totals[right] - (counts[left] * counts[right]).sum(axis=1)
            near = np.flatnonzero((apart <= max_bits) & first & (across > 0))
            num_pairs += int(across[near].sum())
            best = near[np.argsort(apart[near], kind="stable")[:num_listed]]
            listed += [(int(apart[at]), int(hashes[left[at]]), int(hashes[right[at]])) for at in best]
        listed = sorted(listed)[:num_listed]
    return NearDuplicates(
        num_pairs, complete, [(first, second) for _, first, second in listed], [bits for bits, _, _ in listed]
    )
