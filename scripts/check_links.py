"""Request each link to another site in the documentation, and list the broken links.

    python scripts/check_links.py

The exit code is 1 if a link is broken. Links within the documentation are checked when its site is
built.
"""

from __future__ import annotations

import re
import sys
import urllib.error
import urllib.request
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = ("*.md", "docs/*.md", "docs/*.ipynb", "captioner/pretrained/*.md", "assets/**/*.md")
"""Patterns of the files to check."""
URL = re.compile(r"https?://[^\s)>\"'`\\]+")
LOCAL = ("http://127.0.0.1", "http://localhost")
"""Addresses in examples that work only while a server runs. They are not requested."""


def links() -> dict[str, set[str]]:
    """Return all links to other sites, and for each link the paths of the pages that contain it."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for page in (page for pattern in PAGES for page in ROOT.glob(pattern)):
        for link in URL.findall(page.read_text("utf-8")):
            if not link.startswith(LOCAL):
                found[link.rstrip(".,;:")].add(str(page.relative_to(ROOT)))
    return dict(sorted(found.items()))


def problem(link: str) -> str | None:
    """Request a link, and return its problem as text, or None if the link works."""
    request = urllib.request.Request(link, method="HEAD", headers={"User-Agent": "Mozilla/5.0"})
    try:
        with urllib.request.urlopen(request, timeout=30):
            return None
    except urllib.error.HTTPError as error:
        # The page exists, but its server rejects programs (403, 429) or HEAD requests (405).
        return None if error.code in (403, 405, 429) else f"HTTP {error.code}"
    except (urllib.error.URLError, TimeoutError) as error:
        return str(getattr(error, "reason", error))


def main() -> int:
    """Print each broken link with the pages that contain it, and return the exit code."""
    failures = [(link, pages, problem(link)) for link, pages in links().items()]
    for link, pages, failure in failures:
        if failure:
            print(f"{link}  ({', '.join(sorted(pages))}): {failure}")
    return int(any(failure for *_, failure in failures))


if __name__ == "__main__":
    sys.exit(main())
