"""A page to review alternative texts: each with its picture, a field and a box to tick."""

from __future__ import annotations

from typing import Any

from captioner.drawing.document import asset, document, embedded, escaped, with_policy
from captioner.drawing.pages import viewer_scripts, viewer_styles

_BODY = """<body>
<main>
<h1>Alternative texts of {title}</h1>
<p class="quiet">The model's texts are suggestions, often wrong, the least confident first, and its
model card forbids alternative texts without review. Correct each one, tick it as reviewed, download
the table and apply it. In a link or button, name where it leads. Clear the text of a picture that
only decorates.</p>
<p class="tally"><b class="count" role="status"></b>
<button type="button">Download {file}</button></p>
<ul class="review"></ul>
</main>
{data}
</body>"""


def review_page(title: str, data: dict[str, Any]) -> str:
    """The page.

    Args:
        title: Name of the site.
        data: The ``rows`` of the table as dictionaries, ``pictures`` as data URIs by the ``image``
            of a row, and the name of the table's ``file``.
    """
    texts = {"title": escaped(title), "file": escaped(data["file"])}
    body = _BODY.format(**texts, data=embedded(data, "captioner-data"))
    styles, scripts = (
        [*viewer_styles(), asset("review.css")],
        [*viewer_scripts(), asset("review.js")],
    )
    return with_policy(document(f"Review: {title}", body, styles=styles, scripts=scripts))
