"""A page to review alternative texts: each with its picture, a field and a box to tick."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from captioner.data.images import open_image
from captioner.drawing.document import WEB, data_uri, document, embedded, escaped, with_policy
from captioner.drawing.heatmap import fit_photo
from captioner.drawing.pages import VIEWER

_BODY = """<body>
<main>
<h1>Alternative texts of {title}</h1>
<p class="quiet">The model's texts are suggestions, often wrong, the least confident first, and its
model card forbids alternative texts without review. Correct each one, tick it as reviewed, download
the table and apply it. In a link or button, name where it leads. Clear the text of a picture that
only decorates.</p>
<p class="tally"><b role="status"></b> <a href="#" download="{file}">Download {file}</a></p>
<ul class="review"></ul>
</main>
{data}
</body>"""


def review_page(site: Path, file: str, rows: Sequence[dict[str, str]]) -> str:
    """The page of a table: its file name, and its rows, of which those with a text have a file."""
    names = {row["image"] for row in rows if row["alt"]}
    pictures = {name: data_uri(fit_photo(open_image(site / name), 320)) for name in names}
    data = embedded({"rows": rows, "pictures": pictures})
    body = _BODY.format(title=escaped(str(site)), file=escaped(file), data=data)
    files = [*VIEWER, *(WEB / name for name in ("page.css", "review.css", "review.js"))]
    return with_policy(document(f"Review: {site}", body, files))
