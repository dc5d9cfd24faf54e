"""How the static site splits a caption into words (captions.js) against Python's tokenizer."""

from __future__ import annotations

import json

import numpy as np
import pytest

from captioner.caption_types import BRACKETS
from captioner.inference.names import SHIPPED_MODEL
from captioner.text.tokenizer import tokenize

pytestmark = pytest.mark.slow

_SPLIT = """async ([texts, brackets]) => {
    const {splitWords} = await import("/captions.js");
    return texts.map((text) => splitWords(text, brackets));
}"""


def test_plain_captions_are_split_as_in_python(javascript) -> None:
    words = json.loads((SHIPPED_MODEL / "config.json").read_text(encoding="utf-8"))["vocabulary"]
    words = [word for word in words if word.replace("-", "").isalnum() and word[0] != "-"]
    rng = np.random.default_rng(0)
    texts = [
        "A man's dog isn't running, can't swim; and cannot fly!",
        "Two women (one with a hat) at the surfers' beach.",
        "“They're here”, he said — we’ve seen it: 2 dogs & 3 cats...",
        "  The CAT  doesn’t\twant it? ",
        "the dogs' ball, the girl'll catch I'd say I'm",
    ]
    for _ in range(400):
        chosen = rng.choice(words, size=8).tolist()
        chosen[0] = chosen[0].capitalize()
        chosen[3] += ","
        chosen[5] = "man's"
        texts.append(" ".join(chosen) + "!")  # "a." would be an abbreviation

    found = javascript.evaluate(_SPLIT, [texts, BRACKETS])

    differing = [
        (text, words, tokenize(text))
        for text, words in zip(texts, found, strict=True)
        if words != tokenize(text)
    ]
    assert differing == []
