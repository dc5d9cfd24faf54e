"""Overlays and raw maps over HTTP, compared with the Python functions."""

from __future__ import annotations

import io
from xml.etree import ElementTree

import numpy as np
from colour_server import png
from PIL import Image
from test_photos import as_json, file, option, parts, text

import captioner
from captioner.inference.captioner import Captioner

PHOTO = png((1, 2, 3), (64, 48))  # its first word is 1-2-3
KINDS = {
    "/v1/overlay.png": "image/png",
    "/v1/overlay.svg": "image/svg+xml",
    "/v1/overlay.html": "text/html; charset=utf-8",
    "/v1/maps.npy": "application/octet-stream",
}


async def test_overlays_are_those_of_the_python_functions(serve, stored_model, tmp_path):
    own, real = (Captioner(stored_model, precision="fp32") for _ in range(2))
    caption = own.explain(PHOTO, "a dog runs")
    captioner.overlay(PHOTO, caption).save(tmp_path / "wanted.svg")

    server = await serve(of=real)
    found = {}
    for path, kind in KINDS.items():
        response = await server.post(PHOTO, path=path, words="a dog runs").response()
        assert response.status == 200, response.body
        assert response.headers["content-type"] == kind
        found[path] = response.body
    image = Image.open(io.BytesIO(found["/v1/overlay.png"]))
    wanted = captioner.overlay(PHOTO, caption).image()
    np.testing.assert_array_equal(np.asarray(image), np.asarray(wanted))
    assert found["/v1/overlay.svg"] == (tmp_path / "wanted.svg").read_bytes()
    assert found["/v1/overlay.html"].decode() == captioner.page(PHOTO, caption).html
    maps = np.load(io.BytesIO(found["/v1/maps.npy"]), allow_pickle=False)
    np.testing.assert_allclose(maps, caption.alphas, atol=1e-6)


async def test_options_of_the_picture_and_of_the_search(serve):
    """The same in the query, in a form and in JSON."""
    server = await serve()
    same = {"theme": "dark", "only": "1,2", "num_captions": "2"}
    dark = await server.post(PHOTO, path="/v1/overlay.png", **same).response()
    assert Image.open(io.BytesIO(dark.body)).getpixel((0, 0)) == (20, 20, 26)
    for body, headers in (
        parts(file(PHOTO), *[option(*one) for one in same.items()]),
        as_json({"image": text(PHOTO), **same}),
    ):
        response = await server.post(body, path="/v1/overlay.png", headers=headers).response()
        assert response.body == dark.body


async def test_opened_documents_are_sandboxed(serve):
    """A page or SVG opened from this server cannot send requests in its name."""
    server = await serve()
    words = {"words": "<script>alert(1)</script> </svg> dog"}
    page = await server.post(PHOTO, path="/v1/overlay.html", title="<b>", **words).response()
    policy = page.headers["content-security-policy"]
    assert policy.endswith("; frame-ancestors 'none'; sandbox allow-scripts")
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert b"<script>alert" not in page.body
    assert b"<b>" not in page.body
    svg = await server.post(PHOTO, path="/v1/overlay.svg", **words).response()
    assert "sandbox" in svg.headers["content-security-policy"]
    assert "script-src" not in svg.headers["content-security-policy"]
    tree = ElementTree.fromstring(svg.body)
    assert not [one for one in tree.iter() if "script" in one.tag]
    for response in (page, svg):
        assert response.headers["x-content-type-options"] == "nosniff"
