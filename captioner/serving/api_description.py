"""The request bodies in the OpenAPI schema, with examples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from captioner.serving.keys import KEY_HEADER
from captioner.serving.paths import API

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
        {
            "index": 1,
            "name": "notes.txt",
            "status": 415,
            "error": "the photo: not a supported image (it begins with 'hello'); give JPEG, PNG, "
            "WebP, GIF, BMP or TIFF",
        },
    ]
}

_BYTES = {"type": "string", "format": "binary"}
_BASE64 = {
    "type": "string",
    "description": "The bytes of an image file in base64, or a data: URL.",
}


def request_body(options: str, example: str, *, several: bool = False) -> dict[str, Any]:
    """The body of an endpoint, for its ``openapi_extra``.

    Args:
        options: Name of the endpoint's options; see ``describe_bodies``.
        example: Path, query and options of curl for an example.
        several: Whether there may be several photos.
    """
    name = "images" if several else "image"
    schema = f"#/components/schemas/{options}{'Batch' if several else 'Request'}"
    # Without the options, into which Swagger UI would put values that nobody chose.
    form = {
        "type": "object",
        "required": [name],
        "properties": {name: _list(_BYTES) if several else _BYTES},
        "description": "Options of the query may also be fields of the form.",
    }
    json_photo: Any = [EXAMPLE_PHOTO, EXAMPLE_PHOTO] if several else EXAMPLE_PHOTO
    content: dict[str, Any] = {
        "multipart/form-data": {
            "schema": form,
            "example": {name: ["a.jpg", "b.jpg"] if several else "photo.jpg"},
        },
        "application/json": {
            "schema": {"$ref": schema},
            "example": {name: json_photo},
        },
    }
    if not several:
        content |= {kind: {"schema": _BYTES} for kind in ("application/octet-stream", "image/*")}
    note = "; in a form, options come before the photos" if several else ""
    text = (
        "JPEG, PNG, WebP, GIF, BMP, TIFF, or HEIC if the server has pillow-heif; the format is "
        f"detected from the content{note}.\n\n"
    )
    commands = _commands(f"'http://localhost:8000{example}'", several)
    text += "".join(f"    {command}\n" for command in commands)
    return {"requestBody": {"required": True, "description": text, "content": content}}


def _commands(url: str, several: bool) -> list[str]:
    """Shell commands that send photos: as a form, as bytes, and as JSON."""
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


def describe_bodies(app: FastAPI, models: Mapping[str, type[BaseModel]]) -> None:
    """Add the schemas of the JSON bodies, which FastAPI does not parse, to the application's.

    Args:
        app: The application.
        models: Options by the name that ``request_body`` uses.
    """
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        """FastAPI's schema with those of the bodies."""
        if app.openapi_schema is None:
            schemas = generate()["components"]["schemas"]
            for name, model in models.items():
                schemas[f"{name}Request"] = _body(model, {"image": _BASE64})
            schemas["CaptionBatch"] = _body(models["Caption"], {"images": _list(_BASE64)})
        assert app.openapi_schema is not None
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def describe_keys(app: FastAPI) -> None:
    """Add the two ways to send an API key to the schema; ``/docs`` then asks for one."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        """The schema with the keys."""
        schema = generate()
        schema["components"]["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "header": {"type": "apiKey", "in": "header", "name": KEY_HEADER},
        }
        for path, item in schema["paths"].items():
            if path.startswith(API):
                item["post"]["security"] = [{"bearer": []}, {"header": []}]
        return schema

    app.openapi = openapi  # type: ignore[method-assign]


def _list(items: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": dict(items), "minItems": 1}


def _body(options: type[BaseModel], photo: Mapping[str, Any]) -> dict[str, Any]:
    properties = options.model_json_schema()["properties"]
    return {
        "type": "object",
        "required": list(photo),
        "properties": {**photo, **{name: _not_null(one) for name, one in properties.items()}},
        "additionalProperties": False,
    }


def _not_null(schema: dict[str, Any]) -> dict[str, Any]:
    """An optional property: it is left out rather than null."""
    found = {name: value for name, value in schema.items() if name not in ("anyOf", "default")}
    for choice in schema.get("anyOf", ()):
        if choice.get("type") != "null":
            found |= choice
    return found
