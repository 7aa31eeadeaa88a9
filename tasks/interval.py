"""Confidence interval of a proportion that was measured on few images."""


def wilson_interval(hits: float, total: int) -> tuple[float, float]:
    """Return the 95 % confidence interval of a proportion (0-1) of `total` images: Wilson 1927, z = 1.96."""
    z = 1.96
    proportion, spread = hits / total, z * z / total
    centre = (proportion + spread / 2) / (1 + spread)
    half = z / (1 + spread) * (proportion * (1 - proportion) / total + spread / (4 * total)) ** 0.5
    return max(0.0, centre - half), min(1.0, centre + half)
