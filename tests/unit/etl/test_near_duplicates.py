"""The perceptual hash, and the search for close pairs without comparing all pairs."""

import io
import itertools

import numpy as np
import pytest
from PIL import Image, ImageEnhance

from tasks.etl import near_duplicates
from tasks.etl.extract import dhash
from tasks.etl.near_duplicates import (
    Banding,
    choose_banding,
    cluster_hashes,
    find_near_duplicates,
)


def scene(seed: int, side: int = 240) -> Image.Image:
    """Return a smooth image, similar to a photograph at the scale of the hash."""
    coarse = np.random.default_rng(seed).integers(0, 256, (12, 12, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC)


def distance(first: Image.Image, second: Image.Image) -> int:
    """Return the Hamming distance of two images' hashes."""
    return ((dhash(first) ^ dhash(second)) & (2**64 - 1)).bit_count()


def as_jpeg(image: Image.Image, quality: int) -> Image.Image:
    """Return the image after lossy JPEG compression."""
    buffer = io.BytesIO()
    image.save(buffer, format="JPEG", quality=quality)
    return Image.open(buffer)


@pytest.mark.parametrize("seed", range(5))
def test_similar_copies_have_close_hashes(seed: int) -> None:
    """Copies that are smaller, compressed or darker differ in at most 3 bits."""
    image = scene(seed)

    assert distance(image, image.resize((90, 90))) <= 3
    assert distance(image, as_jpeg(image, 40)) <= 3
    assert distance(image, ImageEnhance.Brightness(image).enhance(0.8)) <= 3


def test_different_images_have_distant_hashes() -> None:
    """The hashes of any two of twenty scenes differ in more than 8 bits."""
    assert min(distance(scene(first), scene(second)) for first, second in itertools.combinations(range(20), 2)) > 8


def test_hash_of_a_ramp_is_known() -> None:
    """A ramp that gets brighter to the right sets all 64 bits, which is -1 as a signed integer."""
    ramp = Image.fromarray(np.tile(np.arange(0, 252, 4, dtype=np.uint8), (16, 1)))

    assert dhash(ramp) == -1
    assert dhash(ramp.transpose(Image.Transpose.FLIP_LEFT_RIGHT)) == 0
    assert dhash(Image.new("RGB", (1, 1))) == 0


def test_hamming_distances_count_all_64_bits() -> None:
    """The distance of complements is 64, and that of hashes that differ in the sign is 1."""
    hashes = np.array([-1, 0, -(2**63)], dtype=np.int64)
    counts = np.array([[1, 0, 0], [0, 1, 0], [0, 0, 1]])

    found = find_near_duplicates(hashes, counts, 64, num_listed=5)

    assert found.closest == [(1, -(2**63), 0), (63, -(2**63), -1), (64, -1, 0)]


def hashes_with_near_pairs(count: int, max_flips: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return distinct hashes, half of them copies with up to `max_flips` flipped bits, and counts in three splits."""
    generator = np.random.default_rng(seed)
    base = generator.integers(0, 2**63, count, dtype=np.uint64)
    flipped = base.copy()
    for at in range(count):
        for bit in generator.choice(64, generator.integers(0, max_flips + 1), replace=False):
            flipped[at] ^= np.uint64(1 << int(bit))
    hashes = np.unique(np.concatenate([base, flipped]).view(np.int64))
    counts = generator.integers(0, 3, (len(hashes), 3))
    counts[:, 0] += counts.sum(axis=1) == 0
    return hashes, counts


@pytest.mark.parametrize("max_bits", [0, 1, 3, 8])
def test_banding_finds_the_same_pairs_as_exhaustive_search(max_bits: int) -> None:
    """Banding finds all pairs in different splits; pairs within one split do not count."""
    hashes, counts = hashes_with_near_pairs(150, max_flips=10, seed=max_bits)
    wanted, closest = 0, []
    for first in range(len(hashes)):
        for second in range(first, len(hashes)):
            bits = int((int(hashes[first]) ^ int(hashes[second])) & (2**64 - 1)).bit_count()
            ways = sum(
                int(counts[first, a] * counts[second, b])
                for a in range(3)
                for b in range(3)
                if (a != b if first != second else a < b)
            )
            if bits <= max_bits and ways:
                wanted += ways
                closest.append((bits, {int(hashes[first]), int(hashes[second])}))

    found = find_near_duplicates(hashes, counts, max_bits, num_listed=10_000)

    assert found.complete
    assert found.num_pairs == wanted
    assert [bits for bits, *_ in found.closest] == sorted(bits for bits, _ in closest)
    listed = [(bits, set(pair)) for bits, *pair in found.closest]
    assert all(pair in listed for pair in closest)
    assert len(listed) == len(closest)


@pytest.mark.parametrize("num_equal", [1, 2, 3, 5])
@pytest.mark.parametrize("max_bits", [0, 1, 3, 8])
def test_all_bandings_find_the_same_pairs(max_bits: int, num_equal: int) -> None:
    """Count and closest pairs depend neither on the number of bands of a key nor on the order of the hashes."""
    hashes, counts = hashes_with_near_pairs(400, max_flips=10, seed=max_bits)

    found = find_near_duplicates(hashes, counts, max_bits, 20, Banding(max_bits + num_equal, num_equal))

    assert found == find_near_duplicates(hashes[::-1], counts[::-1], max_bits, 20, Banding(max_bits + 1, 1))
    assert found.num_pairs > 0


def test_longer_keys_are_chosen_for_more_hashes() -> None:
    """Few hashes need one band per key, and ten million at 3 bits two: the buckets stay small."""
    chosen = {count: choose_banding(count, 3) for count in (1_000, 10_000_000)}
    assert chosen == {1_000: Banding(4, 1), 10_000_000: Banding(5, 2)}
    for max_bits in range(9):
        assert (
            choose_banding(10_000_000, max_bits).work(10_000_000)
            < 3 * choose_banding(10_000, max_bits).work(10_000) * 100
        )


def test_list_is_truncated_and_the_count_is_not() -> None:
    """The list has the closest pairs, and the count includes all pairs."""
    hashes = np.array([0, 1, 3, 7], dtype=np.int64)
    counts = np.array([[1, 0, 0], [0, 1, 0], [1, 0, 0], [0, 1, 0]])

    found = find_near_duplicates(hashes, counts, 3, num_listed=2)

    assert (found.num_pairs, [bits for bits, *_ in found.closest]) == (4, [1, 1])


def test_images_of_one_hash_are_counted_without_being_paired() -> None:
    """Millions of images with the same hash are counted by multiplication."""
    found = find_near_duplicates(
        np.array([0], dtype=np.int64), np.array([[10**6, 10**6, 0]], dtype=np.int32), 3, num_listed=5
    )

    assert (found.num_pairs, found.closest, found.complete) == (10**12, [(0, 0, 0)], True)


def test_count_with_a_too_large_bucket_is_marked_incomplete(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket that is not fully compared makes the result incomplete."""
    monkeypatch.setattr(near_duplicates, "BUCKET_NEIGHBOURS", 3)
    hashes = np.arange(16, dtype=np.int64)
    counts = np.ones((16, 3), dtype=np.int64)

    found = find_near_duplicates(hashes, counts, 3, num_listed=5)

    assert not found.complete
    assert found.num_pairs > 0


def test_no_images_have_no_near_duplicates() -> None:
    """An empty table gives an empty and complete result."""
    found = find_near_duplicates(np.zeros(0, dtype=np.int64), np.zeros((0, 3), dtype=np.int64), 3, num_listed=5)

    assert (found.num_pairs, found.closest, found.complete) == (0, [], True)


@pytest.mark.parametrize("max_bits", [0, 1, 3, 8])
def test_clusters_are_those_of_exhaustive_search(max_bits: int) -> None:
    """Close hashes are in one cluster, and so are those that others connect, in any order."""
    hashes, _counts = hashes_with_near_pairs(150, max_flips=10, seed=max_bits)
    expected = list(range(len(hashes)))
    for first, second in itertools.combinations(range(len(hashes)), 2):
        if ((int(hashes[first]) ^ int(hashes[second])) & (2**64 - 1)).bit_count() <= max_bits:
            old, new = expected[second], expected[first]
            expected = [new if cluster == old else cluster for cluster in expected]

    for order in (slice(None), slice(None, None, -1)):
        clusters, complete = cluster_hashes(hashes[order], max_bits)
        pairs = set(zip(clusters.tolist(), expected[order], strict=True))
        assert complete
        assert len(pairs) == len(set(expected)) == len(set(clusters.tolist()))
    assert (len(set(expected)) < len(hashes)) == (max_bits > 0)


def test_chain_of_close_hashes_is_one_cluster() -> None:
    """The ends differ in all bits. An empty table has an empty result."""
    chain = np.array([(1 << bits) - 1 for bits in range(65)], dtype=np.uint64).view(np.int64)

    assert len(set(cluster_hashes(chain, 1)[0].tolist())) == 1
    assert len(set(cluster_hashes(chain[::2], 1)[0].tolist())) == 33
    assert cluster_hashes(chain[:0], 3)[0].tolist() == []


def test_clusters_with_a_too_large_bucket_are_marked_incomplete(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of many nearly plain images is bounded."""
    monkeypatch.setattr(near_duplicates, "BUCKET_NEIGHBOURS", 3)

    assert cluster_hashes(np.arange(16, dtype=np.int64), 3)[1] is False
