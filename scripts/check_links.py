"""Request each external link on all pages of documentation, and list the broken links.

    python scripts/check_links.py

The exit code is 1 if a link is broken. Links within the site are checked when the site is built.
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
URL = re.compile(r"https?://[^\s)>\"'`\\]+")
LOCAL = ("http://127.0.0.1", "http://localhost")


def links() -> dict[str, set[str]]:
    """Return each external link with the pages that contain it."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for page in (page for pattern in PAGES for page in ROOT.glob(pattern)):
        for link in URL.findall(page.read_text("utf-8")):
            if not link.startswith(LOCAL):
                found[link.rstrip(".,;:")].add(str(page.relative_to(ROOT)))
    return dict(sorted(found.items()))


def problem(link: str) -> str | None:
    """Request a link, and return the problem, or None if the link works."""
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
    """Print each broken link with the pages that contain it."""
    failures = [(link, pages, problem(link)) for link, pages in links().items()]
    for link, pages, failure in failures:
        if failure:
            print(f"{link}  ({', '.join(sorted(pages))}): {failure}")
    return int(any(failure for *_, failure in failures))


if __name__ == "__main__":
    sys.exit(main())
