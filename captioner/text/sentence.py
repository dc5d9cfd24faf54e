"""Captions written as sentences."""


def as_sentence(text: str) -> str:
    """Return a caption that starts with a capital letter and ends with a full stop."""
    return text[:1].upper() + text[1:] + "." * text[-1:].isalnum()
