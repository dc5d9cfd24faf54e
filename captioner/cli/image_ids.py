"""Image ids, which name photos in COCO results."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from captioner.cli.console import warn
from captioner.errors import ConfigError


def image_ids(photos: Iterable[Path], annotations: str | None) -> dict[Path, int]:
    """Return the image ids of photos, from an annotations file or else from the file names.

    Photos without an image id are left out, with a warning.

    Raises:
        ConfigError: Two photos have the same image id.
    """
    known: dict[str, int] = {}
    if annotations is not None:
        from captioner.data.coco import read_photos

        listed = read_photos([annotations]).values()
        known = {one.path.name: one.image_id for one in listed}
    owners: dict[int, Path] = {}
    for photo in photos:
        image_id = known.get(photo.name)
        digits = re.fullmatch(r"(?:COCO_\w+_)?(\d+)", photo.stem)
        if not known and digits:
            image_id = int(digits[1])
        if image_id is None:
            warn(
                f"{photo} was left out, because it has no image id; set --annotations to a COCO "
                "captions file that lists the photo"
            )
        elif image_id in owners:
            raise ConfigError(
                f"{owners[image_id]} and {photo} both have the image id {image_id}, but --format "
                "coco writes one caption per id; leave one of them out"
            )
        else:
            owners[image_id] = photo
    return {photo: image_id for image_id, photo in owners.items()}
