"""What the OpenAPI schema says of request bodies, with examples; ``/docs`` and ``/redoc``."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.docs import get_redoc_html, get_swagger_ui_html
from fastapi.responses import HTMLResponse, Response
from pydantic import BaseModel

from captioner.drawing.document import script_hashes

DESCRIPTION = """Captions photos and returns where the model looked for every word.

There are three ways to send a photo, distinguished by the Content-Type:

    curl -F image=@photo.jpg http://localhost:8000/v1/captions
    curl --data-binary @photo.jpg http://localhost:8000/v1/captions
    echo '{"image": "'$(base64 -w0 photo.jpg)'"}' | curl --json @- http://localhost:8000/v1/captions

Options are query parameters, or fields of the form or of the JSON object. Errors are JSON,
`{"error": "..."}`, with one line that states what was given, what is allowed and what to do."""

EXAMPLE_PHOTO = (
    "iVBORw0KGgoAAAANSUhEUgAAABAAAAAMAgMAAAAWidUSAAAADFBMVEXV1dWKiopKSkoVFRUjjGE+AAAAIElEQVR42mP8"
    "z8DAwMTAwMDAshrGYmJgYGBgDEXhYgMAabMCEPW30DAAAAAASUVORK5CYII="
)
"""A PNG of 16 x 12 pixels in base64."""

CAPTIONS_EXAMPLE: dict[str, Any] = {
    "width": 640,
    "height": 480,
    "captions": [
        {
            "text": "a dog runs on grass",
            "words": ["a", "dog", "runs", "on", "grass"],
            "log_prob": -3.2,
            "log_probs": [-0.3, -0.4, -0.9, -0.7, -0.5],
            "confidence": 0.71,
            "doubtful": [],
        }
    ],
}

BATCH_EXAMPLE: dict[str, Any] = {
    "results": [
        {"index": 0, "name": "photo.jpg", "status": 200, **CAPTIONS_EXAMPLE},
        {"index": 1, "name": "notes.txt", "status": 415, "error": "not a supported image"},
    ]
}

_BYTES = {"type": "string", "format": "binary"}
_BASE64 = {
    "type": "string",
    "description": "The bytes of an image file in base64, or a data: URL.",
}


def request_body(options: type[BaseModel], example: str, *, several: bool = False) -> Any:
    """The body of an endpoint, for its ``openapi_extra``.

    Args:
        options: The endpoint's options.
        example: Path, query and options of curl for an example.
        several: Whether there may be several photos.
    """
    name = "images" if several else "image"
    # Without the options, into which Swagger UI would put values that nobody chose.
    form = {
        "type": "object",
        "required": [name],
        "properties": {name: _list(_BYTES) if several else _BYTES},
        "description": "Options of the query may also be fields of the form.",
    }
    body = {
        "type": "object",
        "required": [name],
        "properties": {
            name: _list(_BASE64) if several else _BASE64,
            **options.model_json_schema()["properties"],
        },
        "additionalProperties": False,
    }
    json_photo: Any = [EXAMPLE_PHOTO, EXAMPLE_PHOTO] if several else EXAMPLE_PHOTO
    content: dict[str, Any] = {
        "multipart/form-data": {
            "schema": form,
            "example": {name: ["a.jpg", "b.jpg"] if several else "photo.jpg"},
        },
        "application/json": {"schema": body, "example": {name: json_photo}},
    }
    if not several:
        content |= {kind: {"schema": _BYTES} for kind in ("application/octet-stream", "image/*")}
    note = "; in a form, options come before the photos" if several else ""
    text = (
        "JPEG, PNG, WebP, GIF, BMP, TIFF, or HEIC if the server has pillow-heif; the format is "
        f"detected from the content{note}.\n\n"
    )
    text += "".join(f"    {command}\n" for command in _commands(example, several))
    return {"requestBody": {"required": True, "description": text, "content": content}}


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1}


def _commands(example: str, several: bool) -> list[str]:
    """Shell commands that send photos: as a form, as bytes, and as JSON."""
    url = f"'http://localhost:8000{example}'"
    if several:
        photos = """["'$(base64 -w0 a.jpg)'", "'$(base64 -w0 b.jpg)'"]"""
        return [
            f"curl -F images=@a.jpg -F images=@b.jpg {url}",
            f"""echo '{{"images": {photos}}}' | curl --json @- {url}""",
        ]
    return [
        f"curl -F image=@photo.jpg {url}",
        f"curl --data-binary @photo.jpg {url}",
        f"""echo '{{"image": "'$(base64 -w0 photo.jpg)'"}}' | curl --json @- {url}""",
    ]


_ASSETS = {
    "swagger-ui.css": "text/css",
    "swagger-ui-bundle.js": "text/javascript",
    "redoc.standalone.js": "text/javascript",
}
_REMOTE_LOGO = b"https://cdn.redoc.ly/redoc/logo-mini.svg"


def add_api_pages(app: FastAPI) -> None:
    """Add ``/docs`` (Swagger UI) and ``/redoc``, which need no network.

    FastAPI's own pages load scripts from another host; the package fastapi-offline has these files.
    Addresses are relative, so that they also hold below a proxy's prefix.
    """
    swagger = get_swagger_ui_html(
        openapi_url="openapi.json",
        title="captioner API",
        swagger_js_url="docs/swagger-ui-bundle.js",
        swagger_css_url="docs/swagger-ui.css",
        swagger_favicon_url="data:,",
    )
    redoc = get_redoc_html(
        openapi_url="openapi.json",
        title="captioner API",
        redoc_js_url="docs/redoc.standalone.js",
        redoc_favicon_url="data:,",
        with_google_fonts=False,
    )
    for path, page in {"/docs": swagger, "/redoc": redoc}.items():
        _add_page(app, path, bytes(page.body).decode())
    for name, kind in _ASSETS.items():
        _add_asset(app, name, kind)


def _add_page(app: FastAPI, path: str, page: str) -> None:
    scripts = script_hashes(page) if "<script>" in page else ""
    policy = (
        f"default-src 'none'; script-src 'self' {scripts}; "
        "style-src 'self' 'unsafe-inline'; worker-src blob:; img-src 'self' data: blob:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )

    @app.get(path, include_in_schema=False)
    async def api_page() -> Response:
        return HTMLResponse(page, headers={"Content-Security-Policy": policy})


def _add_asset(app: FastAPI, name: str, kind: str) -> None:
    content = (files("fastapi_offline") / "static" / name).read_bytes()
    content = content.replace(_REMOTE_LOGO, b"data:,")

    @app.get(f"/docs/{name}", include_in_schema=False)
    async def asset() -> Response:
        return Response(content, media_type=kind, headers={"Cache-Control": "max-age=86400"})
