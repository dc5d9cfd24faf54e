"""The tokenizer compared with stored output of the CoreNLP jar, and with the jar if Java exists.

``tests/fixtures/ptb_tokens.json`` has difficult sentences, which were made up, with the jar's
tokens. Its note explains how they were made. No captions of a data set are stored here.
"""

from __future__ import annotations

import json
import shutil
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from captioner.text.tokenizer import caption_tokens, lacks_spaces, tokenize

ROOT = Path(__file__).resolve().parents[3]
DATA = ROOT.parent / "shared" / "data"
CASES: list[tuple[str, list[str]]] = [
    (text, tokens)
    for text, tokens in json.loads(
        (ROOT / "tests" / "fixtures" / "ptb_tokens.json").read_text(encoding="utf-8")
    )["cases"]
]
# What pycocoevalcap drops. Its list has brackets in upper case only, so they are kept after
# -lowerCase; ours does the same.
PUNCTUATION = frozenset(["''", "'", "``", "`", ".", "?", "!", ",", ":", "-", "--", "...", ";"])


def read_captions() -> list[str]:
    """Return all captions of the shared data, or none if it is missing."""
    captions: list[str] = []
    flickr = DATA / "flickr8k" / "Flickr8k.token.txt"
    if flickr.exists():
        rows = flickr.read_text(encoding="utf-8").split("\n")
        captions += [row.split("\t", 1)[1] for row in rows if "\t" in row]
    for name in ("coco_mini", "coco128"):
        path = DATA / name / "annotations" / "captions.json"
        if path.exists():
            annotations = json.loads(path.read_text(encoding="utf-8"))["annotations"]
            captions += [annotation["caption"].replace("\n", " ") for annotation in annotations]
    return captions


@pytest.mark.parametrize(("text", "expected"), CASES, ids=[ascii(text) for text, _ in CASES])
def test_equals_stored_output_of_the_jar(text: str, expected: list[str]) -> None:
    assert tokenize(text) == expected


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("java") is None, reason="java is not installed")
def test_equals_pycocoevalcaps_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    pycocoevalcap = pytest.importorskip("pycocoevalcap.tokenizer.ptbtokenizer")
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", "-Dfile.encoding=UTF-8")
    # A line "x" after each sentence keeps the jar from looking ahead into the next one.
    lines = read_captions() + [line for text, _ in CASES for line in (text, "x")]
    given = {number: [{"caption": text}] for number, text in enumerate(lines)}
    answers = pycocoevalcap.PTBTokenizer().tokenize(given).values()
    differences = [
        (text, answer)
        for text, (answer,) in zip(lines, answers, strict=True)
        if tokenize(text) != [token for token in answer.split(" ") if token]
    ]
    assert differences == []


def test_line_breaks_are_spaces() -> None:
    words = ["a", "dog", "runs"]
    for line_break in ("\n", "\r", "\r\n", "\v", "\f", "\x85", "\u2028", "\u2029"):
        assert tokenize(f"A dog{line_break}runs") == words


def test_blank_text_has_no_tokens() -> None:
    for text in ("", " ", "\n", "\t \u00a0", "\u200b"):
        assert tokenize(text) == []


@pytest.mark.parametrize(
    "text",
    [
        "একটি কুকুর ঘাসের উপর দৌড়াচ্ছে",
        "ஒரு நாய் புல்வெளியில் ஓடுகிறது",
        "कुत्ता घास पर दौड़ रहा है",
        "ක්‍රීඩා කරන බල්ලා",  # with a zero-width joiner
        "ਇੱਕ ਕੁੱਤਾ ਘਾਹ ਉੱਤੇ",
        "കുട്ടി പുല്ലിൽ ഓടുന്നു",
    ],
)
def test_vowel_signs_stay_in_their_words(text: str) -> None:
    assert tokenize(text) == text.split(" ")
    assert caption_tokens(text) == unicodedata.normalize("NFC", text).split(" ")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("一只狗在跑，有2个iPhone。", "一 只 狗 在 跑 有 2 个 iphone"),
        ("か\u3099けの上で「犬」", "が け の 上 で 犬"),
        ("สุนัขวิ่ง", "สุ นั ข วิ่ ง"),
        ("\U00020bb7野家", "\U00020bb7 野 家"),
        ("한 마리의 개가 달린다.", "한 마리의 개가 달린다"),
        ("A dog's cafe\u0301.", "a dog 's café"),
    ],
)
def test_metric_tokens_are_characters_in_scripts_without_spaces(text: str, expected: str) -> None:
    assert caption_tokens(text) == expected.split()


@given(st.text(st.characters(max_codepoint=0x17F)))
def test_metric_tokens_equal_the_jars_in_latin_script(text: str) -> None:
    assert caption_tokens(text) == tokenize(text)


def test_captions_without_spaces_are_recognized() -> None:
    assert lacks_spaces(["一只狗在草地上奔跑。", "สุนัขวิ่งบนหญ้า", "A dog."])
    assert not lacks_spaces(["一只 狗 在 草地 上 奔跑 。"])
    assert not lacks_spaces(["A dog.", "A cat.", "一只狗在草地上奔跑。"])
    assert not lacks_spaces([])


TRICKY = st.sampled_from(sorted({piece for text, _ in CASES for piece in (text, *text.split())}))


@given(st.one_of(st.text(), st.lists(st.one_of(TRICKY, st.text(max_size=3))).map("".join)))
def test_tokens_are_clean(text: str) -> None:
    tokens = tokenize(text)
    assert tokens == tokenize(text)
    for token in tokens:
        assert token
        assert token == token.lower()
        assert token not in PUNCTUATION
        assert " " not in token
        assert "\n" not in token
