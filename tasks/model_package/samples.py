"""Samples of more than 8 bits, scaled to 8 by their range."""

import io
import sys

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageFile, TiffImagePlugin

from .reasons import BadImage, Reason
from .structure import png_chunks

FEW_LEVELS = 1 << 12
"""Samples of 16 bits that are all below it have at most 16 of 256 levels: their range is probably another one."""

_DEEP = ("RGB;16", "RGBA;16", "RGBa;16", "RGBX;16", "LA;16", "CMYK;16")
_PHOTOMETRIC, _WHITE_IS_ZERO = 262, 0
_MAX_SAMPLE, _S_MAX_SAMPLE = 281, 341
"""Tags of TIFF (6.0) with the largest value that samples may have."""


def deep_mode(image: ImageFile.ImageFile) -> str | None:
    """Return PIL's raw mode of an opened file whose samples have more than 8 bits, or None.

    Raises:
        BadImage: Its channels are in separate planes, of which PIL gives wrong bytes.
    """
    if isinstance(image, TiffImagePlugin.TiffImageFile) and image.tag_v2.get(TiffImagePlugin.PLANAR_CONFIGURATION) == 2:
        bits = image.tag_v2.get(TiffImagePlugin.BITSPERSAMPLE, (1,))
        if len(bits) > 1 and max(bits) > 8:
            raise BadImage(Reason.UNSUPPORTED_MODE, f"channels of {max(bits)} bits in separate planes")
    if image.format not in {"PNG", "TIFF"} or not image.tile:  # which is empty once pixels are loaded
        return None
    args = image.tile[0].args
    raw = args if isinstance(args, str) else str((args or [""])[0])
    return raw if image.mode.startswith("I") or raw[:-1] in _DEEP else None


def to_eight_bits(image: ImageFile.ImageFile, content: bytes, raw: str, sample_bits: int | None) -> Image.Image:
    """Return an image with samples of 8 bits, and with an alpha channel for a transparent colour.

    Args:
        image: The loaded image.
        content: Its file.
        raw: Its raw mode, as `deep_mode`.
        sample_bits: As in `Decoding`.

    Raises:
        BadImage: The range of the samples is unknown, or a sample is outside of it.
    """
    samples_HWC, mode = _samples(image, content, raw)
    colours_HWC, alpha_HW1 = np.split(samples_HWC, [samples_HWC.shape[2] - mode.endswith(("A", "a"))], axis=2)
    bits = _bits(colours_HWC, image, content, sample_bits)
    bands_HW = []
    if not alpha_HW1.size and (transparent := image.info.get("transparency")) is not None:
        bands_HW = [np.where((colours_HWC == np.asarray(transparent)).all(axis=2), 0, 255)]
        mode += "A"
    if alpha_HW1.size:
        alpha_HW1 >>= (16 if int(alpha_HW1.max()) >> bits else bits) - 8
    colours_HWC >>= bits - 8  # in place, as a large image would take gigabytes
    if isinstance(image, TiffImagePlugin.TiffImageFile) and image.tag_v2.get(_PHOTOMETRIC) == _WHITE_IS_ZERO:
        np.subtract(255, colours_HWC, out=colours_HWC)
    bands_HW = [*np.moveaxis(samples_HWC, 2, 0), *bands_HW]
    return Image.merge(mode, [Image.fromarray(band_HW.astype(np.uint8)) for band_HW in bands_HW])


def _samples(image: ImageFile.ImageFile, content: bytes, raw: str) -> tuple[npt.NDArray[np.integer], str]:
    """Return the samples of a loaded image, shape (H, W, C), and the mode of an image with the same channels."""
    if image.mode.startswith("I"):
        return np.array(image)[:, :, None], "L"
    # Of other samples PIL keeps the upper byte. Read in the other byte order, it keeps the lower one.
    if raw.startswith("LA"):
        pairs = np.asarray(_read_as(content, "RGBA")).astype(np.uint16)
        return pairs[:, :, ::2] << 8 | pairs[:, :, 1::2], "LA"
    kind, order = raw[:-1], raw[-1]
    other = {"B": "L", "L": "B", "N": "B" if sys.byteorder == "little" else "L"}[order]
    if kind == "RGBa;16":  # premultiplied, which PIL undoes on the upper byte
        image, kind, mode = _read_as(content, f"RGBA;16{order}"), "RGBA;16", "RGBa"
    else:
        mode = image.mode
    samples_HWC = np.asarray(image).astype(np.uint16)
    samples_HWC <<= 8
    samples_HWC |= np.asarray(_read_as(content, kind + other))
    return samples_HWC, mode


def _read_as(content: bytes, raw: str) -> ImageFile.ImageFile:
    image = Image.open(io.BytesIO(content), formats=("PNG", "TIFF"))
    image.tile = [
        tile._replace(args=raw if isinstance(tile.args, str) else (raw, *(tile.args or ())[1:])) for tile in image.tile
    ]
    image.load()
    return image


def _bits(
    colours_HWC: npt.NDArray[np.integer], image: ImageFile.ImageFile, content: bytes, sample_bits: int | None
) -> int:
    """Return the number of bits, at least 8, that the samples of an image use.

    Raises:
        BadImage: It is unknown, or a sample is outside of it.
    """
    least, most = int(np.min(colours_HWC)), int(np.max(colours_HWC))
    bits = sample_bits or _stated_bits(colours_HWC, image, content)
    if bits is None and 0 < most < FEW_LEVELS:
        raise BadImage(
            Reason.UNKNOWN_RANGE,
            f"the samples are at most {most}, and the file does not state their range: give etl.sample_bits",
        )
    bits = bits or 16
    if colours_HWC.dtype == np.uint16:
        bits = min(bits, 16)  # A setting for files of 32 bits, or a tag, may state more than these samples hold.
    if least < 0 or most >> bits:
        raise BadImage(Reason.UNKNOWN_RANGE, f"the samples from {least} to {most} are outside of {bits} bits")
    return bits


def _stated_bits(colours_HWC: npt.NDArray[np.integer], image: ImageFile.ImageFile, content: bytes) -> int | None:
    """Return the number of bits of samples by their file, or None if it does not say it."""
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        largest = image.tag_v2.get(_S_MAX_SAMPLE, image.tag_v2.get(_MAX_SAMPLE))
        if largest is not None:
            return max(8, int(np.max(largest)).bit_length())
        bits = int(np.max(image.tag_v2.get(TiffImagePlugin.BITSPERSAMPLE, 1)))
        return bits if 8 < bits < 16 else None
    found = next((content[start + 8 : end - 4] for kind, start, end in png_chunks(content) if kind == b"sBIT"), b"")
    bits = max(found[: colours_HWC.shape[2]], default=0)
    if not 0 < bits <= 16:
        return None
    if bits == 16 or int(np.max(colours_HWC)) >> bits:
        return 16
    # By the specification samples are scaled to 16 bits. Programs that do not scale them write the same chunk. A dark
    # image may be either, unless its samples show that they were not scaled.
    return None if _may_be_scaled(colours_HWC, bits) else max(8, bits)


def _may_be_scaled(colours_HWC: npt.NDArray[np.integer], bits: int) -> bool:
    """Return whether samples can be `bits` bits scaled to 16: shifted, or multiplied and rounded in either way."""
    found = np.zeros(1 << 16, dtype=bool)
    for row_WC in colours_HWC:  # A large image as an index would take gigabytes.
        found[row_WC] = True
    samples = np.flatnonzero(found)
    step = 65535 / ((1 << bits) - 1)
    exact = np.rint(samples / step) * step
    return not (samples % (1 << (16 - bits))).any() or any(
        np.array_equal(rounded(exact), samples) for rounded in (np.rint, np.floor)
    )
