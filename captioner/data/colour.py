"""Colours of photos, converted to sRGB for the model and the screen.

Most photos are in sRGB and stay as they are. Phones use Display P3, photographers Adobe RGB or
ProPhoto RGB, and printers CMYK. These files contain a profile (ICC). PNG, HEIC and AVIF can name
their colours by numbers instead (CICP), and PNG also by its gamma. For these, a profile is made
here.

A profile that cannot be used is ignored. The picture then has a wrong tint, but is right otherwise.

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
"""x and y of white, red, green and blue, as in PNG's chunk cHRM."""

_BT709 = (0.3127, 0.3290, 0.64, 0.33, 0.30, 0.60, 0.15, 0.06)
_PRIMARIES = {
    1: _BT709,
    9: (0.3127, 0.3290, 0.708, 0.292, 0.170, 0.797, 0.131, 0.046),  # BT.2020
    12: (0.3127, 0.3290, 0.680, 0.320, 0.265, 0.690, 0.150, 0.060),  # Display P3
}
"""Chromaticities by their number in CICP; unknown ones are taken as those of sRGB."""

_PQ, _HLG, _LINEAR = 16, 18, 8
"""Transfer functions by their number in CICP. The others are close to that of sRGB."""

_D50 = np.array([0.9642, 1.0, 0.8249])
_BRADFORD = np.array(
    [[0.8951, 0.2664, -0.1614], [-0.7502, 1.7135, 0.0367], [0.0389, -0.0685, 1.0296]]
)
_MAX_PROFILE = 4 << 20
"""Larger profiles (bytes) are ignored; those of printers have about 2 MB."""


def profile_of(image: Image.Image) -> bytes | None:
    """Return the ICC profile of a picture's pixels, or None if they count as sRGB."""
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
    """Return the picture in sRGB, or None if it needs no change or its profile is unusable.

    Args:
        image: A picture of mode RGB, L or CMYK. An RGB picture may be changed in place.
        profile: The ICC profile of its pixels, for the same kind of colours.
    """
    transform = _transform(profile, image.mode)
    if transform is None:
        return None
    from PIL import ImageCms

    made = ImageCms.applyTransform(image, transform, inPlace=image.mode == "RGB")
    return image if made is None else made


@functools.lru_cache(maxsize=16)
def _transform(profile: bytes, mode: str) -> Any:
    """Return a transform to sRGB, or None if it changes nothing or the profile is damaged."""
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
    """Return a picture of evenly spaced colours or greys."""
    steps = np.arange(0, 256, 17 if mode == "RGB" else 1, dtype=np.uint8)
    if mode == "L":
        return Image.fromarray(steps[None])
    return Image.fromarray(np.stack(np.meshgrid(steps, steps, steps), -1).reshape(1, -1, 3))


@functools.cache
def _cicp_profile(primaries: int, transfer: int) -> bytes | None:
    """Return a profile for colours named by numbers, or None if the colours are sRGB."""
    steps = np.linspace(0, 1, 1024)
    if transfer == _PQ:
        power = steps ** (1 / 78.84375)
        light = np.maximum(power - 0.8359375, 0) / (18.8515625 - 18.6875 * power)
        curve = _below_white(light ** (1 / 0.1593017578125) * (10_000 / 203))
    elif transfer == _HLG:
        a, b, c = 0.17883277, 0.28466892, 0.55991073
        light = np.where(steps <= 0.5, steps**2 / 3, (np.exp((steps - c) / a) + b) / 12)
        curve = _below_white(light / light[int(0.75 * 1023)])
    elif transfer == _LINEAR:
        curve = steps
    elif _PRIMARIES.get(primaries, _BT709) is _BT709:
        return None
    else:
        curve = np.where(steps <= 0.04045, steps / 12.92, ((steps + 0.055) / 1.055) ** 2.4)
    return _matrix_profile(_PRIMARIES.get(primaries, _BT709), curve)


def _below_white(light: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compress light brighter than paper white, 1, so that highlights keep their details."""
    knee = 0.6
    over = np.maximum(light - knee, 0) / (1 - knee)
    return np.where(light <= knee, light, knee + (1 - knee) * over / (1 + over))


@functools.lru_cache(maxsize=16)
def _gamma_profile(gamma: float, primaries: Chromaticities) -> bytes | None:
    """Return a profile for PNG's chunks gAMA and cHRM, or None if they are close to sRGB."""
    if abs(gamma - 1 / 2.2) < 0.01 and np.allclose(primaries, _BT709, atol=0.002):
        return None
    return _matrix_profile(primaries, np.linspace(0, 1, 1024) ** (1 / gamma))


def _matrix_profile(primaries: Chromaticities, curve: NDArray[np.float64]) -> bytes | None:
    """Return an ICC profile of three primaries and a curve, or None if they are invalid.

    The curve has the light of each value. The primaries are adapted from their white to D50, as ICC
    profiles require (Bradford).
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
