"""What the OpenAPI schema says of request bodies, with examples; ``/docs`` and ``/redoc``."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.docs import get_redoc_html, get_swagger_ui_html
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel

from captioner.drawing.pages import hashes

DESCRIPTION = """Captions photos and returns where the model looked for every word.

There are three ways to send a photo, distinguished by the Content-Type:

    curl -F image=@photo.jpg http://localhost:8000/v1/captions
    curl --data-binary @photo.jpg http://localhost:8000/v1/captions
    echo '{"image": "'$(base64 -w0 photo.jpg)'"}' | curl --json @- http://localhost:8000/v1/captions

Options are query parameters, or fields of the form or of the JSON object. Errors are JSON,
`{"error": "..."}`, with one line that states what was given, what is allowed and what to do."""

# A PNG of 16 x 12 pixels.
EXAMPLE_PHOTO = (
    "iVBORw0KGgoAAAANSUhEUgAAABAAAAAMAgMAAAAWidUSAAAADFBMVEXV1dWKiopKSkoVFRUjjGE+AAAAIElEQVR42mP8"
    "z8DAwMTAwMDAshrGYmJgYGBgDEXhYgMAabMCEPW30DAAAAAASUVORK5CYII="
)

_BYTES = {"type": "string", "format": "binary"}
_BASE64 = {"type": "string", "description": "The bytes of an image file in base64, or a data: URL."}
_NOTE = """JPEG, PNG, WebP, GIF, BMP, TIFF, or HEIC if the server has pillow-heif; the format is
detected from the content. Options come before the photos if there are several.

"""


def request_body(options: type[BaseModel], example: str, *, several: bool = False) -> Any:
    """The body of an endpoint, for its ``openapi_extra``, with curl's arguments as example."""
    name, files = ("images", ["a.jpg", "b.jpg"]) if several else ("image", ["photo.jpg"])

    def described(photo: dict[str, str], others: dict[str, Any], examples: list[str]) -> Any:
        items = {"type": "array", "items": photo} if several else photo
        properties = {name: items, **others}
        schema = {"type": "object", "required": [name], "properties": properties}
        return {"schema": schema, "example": {name: examples if several else examples[0]}}

    fields = options.model_json_schema()["properties"]
    content = {
        # Without the options: Swagger UI would fill in values for all of them.
        "multipart/form-data": described(_BYTES, {}, files),
        "application/json": described(_BASE64, fields, [EXAMPLE_PHOTO] * 2),
    }
    if not several:
        content |= {kind: {"schema": _BYTES} for kind in ("application/octet-stream", "image/*")}
    photos = " ".join(f"-F {name}=@{file}" for file in files)
    text = f"{_NOTE}    curl {photos} 'http://localhost:8000{example}'\n"
    return {"requestBody": {"required": True, "description": text, "content": content}}


def add_api_pages(app: FastAPI, *, keys: bool) -> None:
    """Add ``/openapi.json``, ``/docs`` (Swagger UI) and ``/redoc``, which need no network.

    The commands in it have the address that was requested and, with ``keys``, a header for one.
    FastAPI's own pages load scripts from another host; the package fastapi-offline has these files.
    Addresses are relative, so that they also hold below a proxy's prefix.
    """

    async def schema(request: Request) -> Response:
        address = json.dumps(str(request.base_url).rstrip("/"))[1:-1]
        curl = "curl -H 'Authorization: Bearer KEY' " if keys else "curl "
        text = json.dumps(app.openapi()).replace("http://localhost:8000", address)
        prefix = request.scope.get("root_path")
        servers = {"servers": [{"url": prefix}]} if prefix else {}
        return JSONResponse(json.loads(text.replace("curl ", curl)) | servers)

    app.add_route("/openapi.json", schema, include_in_schema=False)
    same: dict[str, Any] = {"openapi_url": "openapi.json", "title": "captioner API"}
    js, css, redoc_js = "swagger-ui-bundle.js", "swagger-ui.css", "redoc.standalone.js"
    swagger = get_swagger_ui_html(
        **same,
        swagger_js_url=f"docs/{js}",
        swagger_css_url=f"docs/{css}",
        swagger_favicon_url="data:,",
    )
    redoc = get_redoc_html(
        **same, redoc_js_url=f"docs/{redoc_js}", redoc_favicon_url="data:,", with_google_fonts=False
    )
    for path, page in {"/docs": swagger, "/redoc": redoc}.items():
        html = bytes(page.body).decode()
        scripts = hashes("script", html) if "<script>" in html else ""
        page.headers["Content-Security-Policy"] = (
            f"default-src 'none'; script-src 'self' {scripts}; "
            "style-src 'self' 'unsafe-inline'; worker-src blob:; img-src 'self' data: blob:; "
            "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        add_file(app, path, page)
    for name, kind in {css: "text/css", js: "text/javascript", redoc_js: "text/javascript"}.items():
        content = (files("fastapi_offline") / "static" / name).read_bytes()
        content = content.replace(b"https://cdn.redoc.ly/redoc/logo-mini.svg", b"data:,")
        headers = {"Cache-Control": "max-age=86400"}
        add_file(app, f"/docs/{name}", Response(content, media_type=kind, headers=headers))


def add_file(app: FastAPI, path: str, response: Response) -> None:
    """Add a page that is not part of the API."""

    async def file(_: Any) -> Response:
        return response

    app.add_route(path, file, include_in_schema=False)
