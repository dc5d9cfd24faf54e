"""One HTML document that needs nothing else: styles, scripts, pictures and data stand inside.

It says itself what it may do (Content-Security-Policy): its own scripts run, known by their hashes,
and nothing is fetched. Text is escaped, data are escaped JSON in a block that is never executed.
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

from captioner.errors import ConfigError
from captioner.visualization.theme import THEMES

MOST_PIXELS = 65_500
"""A side of a picture in a page: of JPEG."""

_JPEG_QUALITY = 88
_SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL)
_STYLE = re.compile(r"<style>(.*?)</style>", re.DOTALL)


def asset(name: str, folder: Path = Path(__file__).parent / "web") -> str:
    """A script or a style that comes with the package."""
    return (folder / name).read_text(encoding="utf-8")


def escaped(text: str) -> str:
    """Text as it stands between tags and in quoted attributes."""
    return html.escape(_printable(text), quote=True)


def embedded(data: Any, element_id: str) -> str:
    """Data as an element that a script can read and that no text in it can leave."""
    text = _printable(json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False))
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return f'<script type="application/json" id="{escaped(element_id)}">{text}</script>'


def _printable(text: str) -> str:
    """With what UTF-8 cannot hold (bytes of a file's name that are no letters) as ``?``."""
    return text.encode("utf-8", "replace").decode("utf-8")


def data_uri(image: Image.Image) -> str:
    """A picture as an address that holds it, JPEG."""
    buffer = io.BytesIO()
    image.save(buffer, format="JPEG", quality=_JPEG_QUALITY)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def document(
    title: str,
    body: str,
    *,
    styles: Sequence[str],
    scripts: Sequence[str],
    theme: Literal["auto", "light", "dark"] = "auto",
) -> str:
    """The whole document.

    Args:
        title: Plain text.
        body: Markup, with all text in it escaped.
        styles: Style sheets.
        scripts: Scripts, run in their order after the body.
        theme: auto follows the reader's system.

    Raises:
        ConfigError: There is no such theme.
    """
    if theme not in ("auto", *THEMES):
        raise ConfigError(f"unknown theme {theme!r}; choose one of auto, {', '.join(THEMES)}")
    head = [
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<link rel="icon" href="data:,">',
        f"<title>{escaped(title)}</title>",
        *(f"<style>{style}</style>" for style in styles),
    ]
    code = "".join(f"<script>{script}</script>" for script in scripts)
    root = '<html lang="en">' if theme == "auto" else f'<html lang="en" data-theme="{theme}">'
    return f"<!doctype html>\n{root}\n{chr(10).join(head)}\n{body}\n{code}\n</html>\n"


def closed(page: str) -> str:
    """The document with its own policy inside: for a file, which has no server to send one."""
    rule = f'<meta http-equiv="Content-Security-Policy" content="{escaped(policy(page))}">'
    return page.replace('<meta charset="utf-8">', f'<meta charset="utf-8">\n{rule}', 1)


def policy(page: str, *, connect: str = "'none'") -> str:
    """The Content-Security-Policy under which a document's own scripts and styles work.

    Args:
        page: From ``document``.
        connect: Where its scripts may send requests.
    """
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src {_hashes(_SCRIPT, page)}",
            f"style-src {_hashes(_STYLE, page)}",
            "img-src data: blob:",
            f"connect-src {connect}",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )


def _hashes(elements: re.Pattern[str], page: str) -> str:
    digests = (hashlib.sha256(text.encode()).digest() for text in elements.findall(page))
    return " ".join(f"'sha256-{base64.b64encode(d).decode()}'" for d in digests) or "'none'"
