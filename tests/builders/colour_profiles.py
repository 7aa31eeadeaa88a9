"""ICC profiles of tests, as bytes: a screen with other primaries, gray with a gamma, and a printer."""

import struct

import numpy as np

D50 = (0.9642, 1.0, 0.8249)

ADOBE_RGB = ((0.60974, 0.31111, 0.01947), (0.20528, 0.62567, 0.06087), (0.14919, 0.06322, 0.74457))
"""XYZ of red, green and blue of Adobe RGB (1998), adapted to D50: its specification, annex C."""

GAMMA = 2.2


def _numbers(*values: float) -> bytes:
    return b"".join(struct.pack(">i", round(value * 65536)) for value in values)


def _profile(kind: bytes, space: bytes, connection: bytes, tags: dict[bytes, bytes]) -> bytes:
    """Return a profile of version 2.1 with these tags (ICC.1:2001-04)."""
    place, table, data = 128 + 4 + 12 * len(tags), b"", b""
    for name, content in tags.items():
        padded = content + bytes(-len(content) % 4)
        table += struct.pack(">4sII", name, place + len(data), len(content))
        data += padded
    size = place + len(data)
    header = struct.pack(">I4sI4s4s4s12s4s", size, bytes(4), 0x02100000, kind, space, connection, bytes(12), b"acsp")
    header += bytes(28) + _numbers(*D50)
    return header + bytes(128 - len(header)) + struct.pack(">I", len(tags)) + table + data


def _texts() -> dict[bytes, bytes]:
    text = b"a profile of tests\0"
    described = b"desc" + bytes(4) + struct.pack(">I", len(text)) + text + bytes(4 + 4 + 2 + 1 + 67)
    return {b"desc": described, b"cprt": b"text" + bytes(4) + b"none\0", b"wtpt": b"XYZ " + bytes(4) + _numbers(*D50)}


def _curve(gamma: float) -> bytes:
    return b"curv" + bytes(4) + struct.pack(">IH", 1, round(gamma * 256))


def adobe_rgb() -> bytes:
    """Return a profile with the primaries and the gamma of Adobe RGB."""
    colours = {
        name: b"XYZ " + bytes(4) + _numbers(*xyz)
        for name, xyz in zip((b"rXYZ", b"gXYZ", b"bXYZ"), ADOBE_RGB, strict=True)
    }
    curves = dict.fromkeys((b"rTRC", b"gTRC", b"bTRC"), _curve(GAMMA))
    return _profile(b"mntr", b"RGB ", b"XYZ ", _texts() | colours | curves)


def gray(gamma: float) -> bytes:
    """Return a profile of gray levels with a gamma."""
    return _profile(b"mntr", b"GRAY", b"XYZ ", _texts() | {b"kTRC": _curve(gamma)})


def printer() -> bytes:
    """Return a profile of four inks, with a grid of two points for each: cyan is L*a*b* (55, -37, -50), black dark."""
    lab = {0: (100, 0, 0), 0b1000: (55, -37, -50), 0b0100: (48, 74, -3), 0b0010: (89, -5, 93)}
    corners = []
    for corner in range(16):
        light, a, b = lab.get(corner, (20, 0, 0))
        corners += [round(light * 2.55), a + 128, b + 128]
    straight = bytes(range(256))
    table = b"mft1" + bytes(4) + bytes([4, 3, 2, 0]) + _numbers(*np.eye(3).ravel())
    table += 4 * straight + bytes(corners) + 3 * straight
    return _profile(b"prtr", b"CMYK", b"Lab ", _texts() | {b"A2B0": table})


def from_adobe_rgb(pixels_HWC: np.ndarray) -> np.ndarray:
    """Return sRGB levels (float64, 0-255) of levels in Adobe RGB, by the formulas of both; too vivid ones are cut."""
    srgb = np.array(
        [[3.1338561, -1.6168667, -0.4906146], [-0.9787684, 1.9161415, 0.0334540], [0.0719453, -0.2289914, 1.4052427]]
    )
    linear_HWC = (pixels_HWC / 255) ** GAMMA @ np.array(ADOBE_RGB) @ srgb.T
    linear_HWC = linear_HWC.clip(0, 1)
    return 255 * np.where(linear_HWC <= 0.0031308, 12.92 * linear_HWC, 1.055 * linear_HWC ** (1 / 2.4) - 0.055)
