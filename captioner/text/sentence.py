"""Captions written as sentences."""


def as_sentence(text: str) -> str:
    """Return a caption with a capital letter at the start and a full stop at the end."""
    return text[:1].upper() + text[1:] + "." * text[-1:].isalnum()
