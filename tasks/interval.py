"""The interval within which a share that was measured on a few images lies."""


def wilson_interval(hits: float, total: int) -> tuple[float, float]:
    """Return the 95 % interval of a share (0-1) that was measured on `total` images: Wilson 1927, z = 1.96."""
    z = 1.96
    share, spread = hits / total, z * z / total
    middle = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * (share * (1 - share) / total + spread / (4 * total)) ** 0.5
    return max(0.0, middle - half), min(1.0, middle + half)
