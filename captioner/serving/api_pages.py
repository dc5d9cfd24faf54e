"""``/docs`` (Swagger UI) and ``/redoc`` without a network; fastapi-offline has their files."""

from __future__ import annotations

from importlib.resources import files

from fastapi import FastAPI
from fastapi.responses import HTMLResponse, Response

from captioner.drawing.document import script_hashes

# Relative addresses: they also hold below a proxy's prefix.
_PAGES = {
    "/docs": """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>captioner API</title>
<link rel="stylesheet" href="docs/swagger-ui.css">
</head>
<body>
<div id="swagger-ui"></div>
<script src="docs/swagger-ui-bundle.js"></script>
<script>SwaggerUIBundle({
  url: "openapi.json", dom_id: "#swagger-ui", deepLinking: true, validatorUrl: null,
})</script>
</body>
</html>
""",
    "/redoc": """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>captioner API</title>
</head>
<body>
<div id="redoc"></div>
<script src="docs/redoc.standalone.js"></script>
<script>Redoc.init("openapi.json", {disableSearch: true}, document.getElementById("redoc"))</script>
</body>
</html>
""",
}

_ASSETS = {
    "swagger-ui.css": "text/css",
    "swagger-ui-bundle.js": "text/javascript",
    "redoc.standalone.js": "text/javascript",
}

_REMOTE_LOGO = b"https://cdn.redoc.ly/redoc/logo-mini.svg"


def add_api_pages(app: FastAPI) -> None:
    """Add the two pages and their assets."""
    for path, page in _PAGES.items():
        _add_page(app, path, page)
    for name, kind in _ASSETS.items():
        _add_asset(app, name, kind)


def _add_page(app: FastAPI, path: str, page: str) -> None:
    styles = "'self' 'unsafe-inline'" if "redoc" in page else "'self'"  # ReDoc makes its styles
    headers = {"Content-Security-Policy": _policy(page, styles)}

    async def api_page() -> Response:
        return HTMLResponse(page, headers=headers)

    app.get(path, include_in_schema=False)(api_page)


def _add_asset(app: FastAPI, name: str, kind: str) -> None:
    content = (files("fastapi_offline") / "static" / name).read_bytes()
    content = content.replace(_REMOTE_LOGO, b"data:,")
    headers = {"Cache-Control": "max-age=86400"}

    async def asset() -> Response:
        return Response(content, media_type=kind, headers=headers)

    app.get(f"/docs/{name}", include_in_schema=False)(asset)


def _policy(page: str, styles: str) -> str:
    """Only files of this server, and requests to it."""
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src 'self' {script_hashes(page)}",
            f"style-src {styles}",
            "img-src 'self' data: blob:",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        ]
    )
