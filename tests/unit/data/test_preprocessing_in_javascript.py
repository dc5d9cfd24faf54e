"""The static site's preprocessing (resize.js and photo.js) against Pillow's, byte by byte."""

from __future__ import annotations

import numpy as np
import PIL
import pytest
from PIL import Image

from captioner.model.preprocessing import Preprocessing

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        int(PIL.__version__.split(".")[0]) < 13, reason="Pillow 13 changed the order of the axes"
    ),
]

_PIXELS = """async ({width, height, pixels, settings}) => {
    const {cropBox, encoderInput} = await import("/photo.js");
    const bytes = Uint8ClampedArray.from(pixels);
    const rows = (top, bottom) => bytes.subarray(4 * top * width, 4 * bottom * width);
    const box = cropBox(width, height, settings);
    return [box, [...encoderInput(width, height, rows, box, settings)]];
}"""


@pytest.mark.parametrize("resize", ["squash", "crop"])
@pytest.mark.parametrize("order", ["RGB", "BGR"])
@pytest.mark.parametrize(
    ("width", "height"),
    [
        (100, 70),  # smaller, in both axes
        (70, 131),  # odd sides: the crop begins inside a pixel
        (333, 9),  # one smaller, one larger
        (9, 33),
        (1, 1),
        (17, 500),  # more rows than are read at once
        (24, 24),  # as large as the input: unchanged
        (36, 48),  # the last before, and the first after, the order of the axes changes
        (36, 49),
        (100, 200),
    ],
)
def test_the_encoder_sees_the_same_bytes(javascript, width, height, resize, order) -> None:
    noise = np.random.default_rng(width).integers(256, size=(height, width, 3), dtype=np.uint8)
    noise[: height // 2] = np.where(noise[: height // 2] > 127, 255, 0)  # overshoots are clipped
    settings = Preprocessing(image_size=24, resize=resize, channel_order=order)
    opaque = np.dstack([noise, np.full((height, width), 255, np.uint8)])

    box, found = javascript.evaluate(
        _PIXELS,
        {
            "width": width,
            "height": height,
            "pixels": opaque.ravel().tolist(),
            "settings": {"image_size": 24, "resize": resize, "channel_order": order},
        },
    )

    assert box == pytest.approx(settings.crop_box(width, height))
    expected = settings.pixels(Image.fromarray(noise))
    assert np.array_equal(np.reshape(found, (24, 24, 3)), expected)
