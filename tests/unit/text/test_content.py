"""Content words and their stems."""

from captioner.text.content import content_stems


def test_forms_of_a_word_are_one_content_word():
    assert content_stems("A dog riding with two dogs rides a bike.") == content_stems(
        "dogs ride two bikes"
    )


def test_function_words_are_left_out():
    assert content_stems("there is a cat on top of it") == ["cat"]
