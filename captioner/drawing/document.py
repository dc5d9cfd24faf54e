"""Self-contained HTML documents: styles, scripts, pictures and data are embedded.

A Content-Security-Policy allows only the document's own scripts, by hash, and no requests. Text is
escaped; data are escaped JSON in a block that is never executed.
"""

from __future__ import annotations

import base64
import hashlib
import html
import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from PIL import Image

MAX_SIDE = 65_500
"""Largest side of a JPEG picture in pixels."""

WEB = Path(__file__).parent / "web"
ThemeName = Literal["auto", "light", "dark"]

_QUALITY = 88


def asset(path: Path) -> str:
    """Read a script, style sheet or template of the package."""
    return path.read_text(encoding="utf-8")


def escaped(text: str) -> str:
    """Escape text for elements and quoted attributes."""
    return html.escape(_printable(text), quote=True)


def embedded(data: Any) -> str:
    """Embed data as JSON for the scripts, escaped so that no text in it can close the element."""
    text = _printable(json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False))
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return f'<script type="application/json" id="captioner-data">{text}</script>'


def _printable(text: str) -> str:
    """Replace what UTF-8 cannot encode, such as undecodable bytes of a file name, by ``?``."""
    return text.encode("utf-8", "replace").decode("utf-8")


def data_uri(image: Image.Image) -> str:
    """Encode a picture as a data URI."""
    return base64_uri("jpeg", encoded(image, "JPEG", quality=_QUALITY))


def base64_uri(kind: str, data: bytes) -> str:
    """The content of a picture file as a data URI."""
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    """A picture as the bytes of a file of Pillow's format ``kind``, with its options."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def document(
    title: str,
    body: str,
    files: Sequence[Path],
    *,
    theme: ThemeName = "auto",
    head: Sequence[str] = (),
) -> str:
    """Build the document; text in its ``body`` must be escaped.

    Of the ``files``, style sheets and scripts, the scripts run in order after the body. ``head``
    has more elements, such as another icon than an empty one.
    """
    styles = [asset(path) for path in files if path.suffix == ".css"]
    scripts = [asset(path) for path in files if path.suffix == ".js"]
    elements = [
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        *(head or ['<link rel="icon" href="data:,">']),
        f"<title>{escaped(title)}</title>",
        *(f"<style>{style}</style>" for style in styles),
    ]
    code = "".join(f"<script>{script}</script>" for script in scripts)
    root = '<html lang="en">' if theme == "auto" else f'<html lang="en" data-theme="{theme}">'
    return f"<!doctype html>\n{root}\n{chr(10).join(elements)}\n{body}\n{code}\n</html>\n"


def with_policy(page: str, rules: str | None = None) -> str:
    """Add a policy (default: that of ``policy``), for files, which have no server to send it."""
    content = escaped(rules or policy(page))
    rule = f'<meta http-equiv="Content-Security-Policy" content="{content}">'
    return page.replace('<meta charset="utf-8">', f'<meta charset="utf-8">\n{rule}', 1)


def policy(page: str, *, connect: str = "'none'", scripts: str = "", images: str = "") -> str:
    """The Content-Security-Policy that allows a document's own scripts and styles only.

    The others are further sources of ``connect-src``, ``script-src`` and ``img-src``.
    """
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src {hashes('script', page)} {scripts}".rstrip(),
            f"style-src {hashes('style', page)}",
            f"img-src data: blob: {images}".rstrip(),
            f"connect-src {connect}",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )


def hashes(kind: str, page: str) -> str:
    """The inline elements of a document, ``script`` or ``style``, as sources of a directive."""
    texts = re.findall(f"<{kind}>(.*?)</{kind}>", page, re.DOTALL)
    digests = (hashlib.sha256(text.encode()).digest() for text in texts)
    return " ".join(f"'sha256-{base64.b64encode(d).decode()}'" for d in digests) or "'none'"
