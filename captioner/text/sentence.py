"""Captions written as sentences."""


def as_sentence(text: str) -> str:
    """Return a caption with a capital letter at its start and a full stop at its end.

    The full stop is added only if the caption ends with a letter or a digit.
    """
    return text[:1].upper() + text[1:] + "." * text[-1:].isalnum()
