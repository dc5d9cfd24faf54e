"""The formats of captions."""

from __future__ import annotations

import io

import pytest

from captioner.cli.caption_formats import FORMATS

CAPTIONS = [
    {"text": "a cat", "confidence": 0.718, "keywords": [{"word": "cat", "probability": 0.9}]},
    {"text": "a dog", "confidence": 0.123, "unsure": True},
    {"text": "a hat", "confidence": None},
]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("file", "sure"), [(Terminal(), " (72% likely to be right)"), (io.StringIO(), "")]
)
def test_text_has_the_confidence_on_a_terminal_only(file, sure) -> None:
    FORMATS["text"].write(file, [{"image": "x.jpg", "captions": [one]} for one in CAPTIONS])

    assert file.getvalue().splitlines() == [
        f"x.jpg: a cat{sure} [cat]",
        "x.jpg: a dog (unsure: 0.12)",
        "x.jpg: a hat",
    ]
