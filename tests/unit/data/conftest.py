"""Grey photos, and their captions as tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
from grey_photos import grey_photos

from captioner.data.example import Example
from captioner.text.vocabulary import END


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> list[Example]:
    return grey_photos(tmp_path_factory.mktemp("photos"))


@pytest.fixture(scope="session")
def photos(images: list[Example]) -> list[Example]:
    """Captions of one to three words, the first of which is the photo's id."""
    return [
        replace(one, tokens=tuple([one.image_id, *[5] * r, END] for r in range(len(one.captions))))
        for one in images
    ]
