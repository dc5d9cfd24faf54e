"""Conversion of photo colours to sRGB, for the model and the screen.

Most photos are in sRGB and are not changed. Phones use Display P3, photographers use Adobe RGB or
ProPhoto RGB, and printers use CMYK. Files with such colours contain an ICC profile. PNG, HEIC and
AVIF can instead identify the colours by numbers (CICP), and PNG can contain a gamma value. This
module builds a profile from these values.

An unusable profile is ignored. The picture then has a wrong tint, but no other error.

Source: ICC.1:2004 (profiles), ITU-T H.273 (CICP), ITU-R BT.2100 (PQ and HLG), Lindbloom (matrices).
"""

from __future__ import annotations

import functools
import io
import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Chromaticities = tuple[float, ...]
"""The coordinates x and y of white, red, green and blue, as in the PNG chunk cHRM."""

_BT709 = (0.3127, 0.3290, 0.64, 0.33, 0.30, 0.60, 0.15, 0.06)
_PRIMARIES = {
    1: _BT709,
    9: (0.3127, 0.3290, 0.708, 0.292, 0.170, 0.797, 0.131, 0.046),  # BT.2020
    12: (0.3127, 0.3290, 0.680, 0.320, 0.265, 0.690, 0.150, 0.060),  # Display P3
}
"""Chromaticities by CICP number. Unknown numbers are treated as sRGB."""

_PQ, _HLG, _LINEAR = 16, 18, 8
"""CICP numbers of transfer functions, which map pixel values to light. Transfer functions with
other numbers are close to the function of sRGB."""

_D50 = np.array([0.9642, 1.0, 0.8249])  # XYZ of the white point of ICC profiles
_BRADFORD = np.array(
    [[0.8951, 0.2664, -0.1614], [-0.7502, 1.7135, 0.0367], [0.0389, -0.0685, 1.0296]]
)  # converts XYZ to the responses of the eye's cones
_MAX_PROFILE = 4 << 20
"""Limit on the size of a profile (bytes). Larger profiles are ignored. Printer profiles have about
2 MB."""


def profile_of(image: Image.Image) -> bytes | None:
    """Return the ICC profile of a picture's pixels, or None if the pixels are treated as sRGB."""
    info = image.info
    if numbers := info.get("cicp"):
        return _cicp_profile(*numbers)
    profile = info.get("icc_profile")
    if isinstance(profile, bytes) and 128 < len(profile) <= _MAX_PROFILE:
        return profile
    if image.format != "PNG" or "srgb" in info or not {"gamma", "chromaticity"} & info.keys():
        return None
    gamma, primaries = info.get("gamma", 1 / 2.2), info.get("chromaticity", _BT709)
    return _gamma_profile(gamma, primaries) if 0.1 < gamma < 10 else None


def to_srgb(image: Image.Image, profile: bytes) -> Image.Image | None:
    """Convert a picture to sRGB, or return None if this is not necessary or not possible.

    Args:
        image: A picture of mode RGB, L or CMYK. An RGB picture may be changed in place.
        profile: The ICC profile of the picture. It must be for the picture's mode.
    """
    transform = _transform(profile, image.mode)
    if transform is None:
        return None
    from PIL import ImageCms

    made = ImageCms.applyTransform(image, transform, inPlace=image.mode == "RGB")
    return image if made is None else made


@functools.lru_cache(maxsize=16)
def _transform(profile: bytes, mode: str) -> Any:
    """Return a transform from a profile to sRGB, or None if it is not useful.

    It is not useful if the profile is damaged, or if the transform changes no colour by more than 1
    of 255 levels.
    """
    try:
        from PIL import ImageCms

        transform = ImageCms.buildTransform(
            io.BytesIO(profile),
            ImageCms.createProfile("sRGB"),
            mode,
            "RGB",
            ImageCms.Intent.RELATIVE_COLORIMETRIC,
            ImageCms.Flags.BLACKPOINTCOMPENSATION,
        )
        if mode == "CMYK":
            return transform
        known = _samples(mode)
        made = ImageCms.applyTransform(known, transform)
    except Exception:  # a missing or damaged profile may raise nearly anything
        return None
    change = np.asarray(made, dtype=int) - np.asarray(known.convert("RGB"))
    return transform if np.abs(change).max() > 1 else None


def _samples(mode: str) -> Image.Image:
    """Return a picture of evenly spaced colours or greys, to test a transform."""
    steps = np.arange(0, 256, 17 if mode == "RGB" else 1, dtype=np.uint8)
    if mode == "L":
        return Image.fromarray(steps[None])
    return Image.fromarray(np.stack(np.meshgrid(steps, steps, steps), -1).reshape(1, -1, 3))


@functools.cache
def _cicp_profile(primaries: int, transfer: int) -> bytes | None:
    """Return an ICC profile for two CICP numbers, or None if the numbers stand for sRGB."""
    steps = np.linspace(0, 1, 1024)
    if transfer == _PQ:
        power = steps ** (1 / 78.84375)
        light = np.maximum(power - 0.8359375, 0) / (18.8515625 - 18.6875 * power)
        # PQ encodes up to 10,000 cd/m2, and paper white has 203 cd/m2.
        curve = _below_white(light ** (1 / 0.1593017578125) * (10_000 / 203))
    elif transfer == _HLG:
        a, b, c = 0.17883277, 0.28466892, 0.55991073
        light = np.where(steps <= 0.5, steps**2 / 3, (np.exp((steps - c) / a) + b) / 12)
        # Paper white is at 75% of the signal.
        curve = _below_white(light / light[int(0.75 * 1023)])
    elif transfer == _LINEAR:
        curve = steps
    elif _PRIMARIES.get(primaries, _BT709) is _BT709:
        return None
    else:
        curve = np.where(steps <= 0.04045, steps / 12.92, ((steps + 0.055) / 1.055) ** 2.4)
    return _matrix_profile(_PRIMARIES.get(primaries, _BT709), curve)


def _below_white(light: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compress light above 0.6 of paper white into the range from 0.6 to 1 (paper white).

    Highlights above paper white therefore keep their details.
    """
    knee = 0.6
    over = np.maximum(light - knee, 0) / (1 - knee)
    return np.where(light <= knee, light, knee + (1 - knee) * over / (1 + over))


@functools.lru_cache(maxsize=16)
def _gamma_profile(gamma: float, primaries: Chromaticities) -> bytes | None:
    """Return an ICC profile for PNG's chunks gAMA and cHRM, or None if they are close to sRGB."""
    if abs(gamma - 1 / 2.2) < 0.01 and np.allclose(primaries, _BT709, atol=0.002):
        return None
    return _matrix_profile(primaries, np.linspace(0, 1, 1024) ** (1 / gamma))


def _matrix_profile(primaries: Chromaticities, curve: NDArray[np.float64]) -> bytes | None:
    """Return an ICC profile from primaries and a tone curve, or None if they are invalid.

    ``curve`` contains the amount of light, 0 to 1, for evenly spaced pixel values. The Bradford
    method adapts the primaries from their own white point to D50, as ICC profiles require.
    """
    try:
        points = np.array(primaries, dtype=float).reshape(4, 2)
        white, *columns = [np.array([x / y, 1, (1 - x - y) / y]) for x, y in points]
        matrix = np.stack(columns, axis=1)
        matrix = matrix * np.linalg.solve(matrix, white)
        cone = np.diag((_BRADFORD @ _D50) / (_BRADFORD @ white))
        matrix = np.linalg.inv(_BRADFORD) @ cone @ _BRADFORD @ matrix
        colours = [struct.pack(">4s4x3i", b"XYZ ", *np.rint(xyz * 65536).astype(int))
                   for xyz in matrix.T]  # fmt: skip
    except (ArithmeticError, ValueError, struct.error, np.linalg.LinAlgError):
        return None
    values = np.rint(curve.clip(0, 1) * 65535).astype(">u2").tobytes()
    tone = struct.pack(">4s4xI", b"curv", len(curve)) + values
    start = 128 + 4 + 6 * 12
    names = [b"rXYZ", b"gXYZ", b"bXYZ", b"rTRC", b"gTRC", b"bTRC"]
    places = [(start + 20 * at, 20) for at in range(3)] + [(start + 60, len(tone))] * 3
    tags = b"".join(struct.pack(">4sII", *tag) for tag in zip(names, [p[0] for p in places],
                    [p[1] for p in places], strict=True))  # fmt: skip
    header = struct.pack(
        ">I4xI4s4s4s12x4s28x3i", start + 60 + len(tone), 0x02400000, b"mntr", b"RGB ", b"XYZ ",
        b"acsp", *np.rint(_D50 * 65536).astype(int),
    )  # fmt: skip
    return b"".join([header.ljust(128, b"\0"), struct.pack(">I", 6), tags, *colours, tone])
