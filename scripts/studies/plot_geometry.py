"""Draw the figure of docs/regions.md: maps on equal cells and at the regions' positions.

python scripts/studies/plot_geometry.py assets/examples/chelsea.jpg docs/regions.jpg
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import captioner


def main() -> None:
    """Caption the photo with the shipped model and draw its maps twice."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("photo", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--only", nargs="+", default=["cat", "sitting", "floor"])
    options = parser.parse_args()
    caption = captioner.load(precision="fp32").caption(options.photo)
    figure = captioner.overlay(
        options.photo,
        [replace(caption, geometry=None), caption],
        labels=["equal cells", "where the regions lie"],
        only=options.only,
        panel_size=240,
    )
    figure.save(options.output)


if __name__ == "__main__":
    main()
