"""Early checks of the search options, before torch and the model are loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from captioner.errors import ConfigError
from captioner.options import SearchOptions


def checked_search(models: Sequence[str], given: Mapping[str, Any]) -> SearchOptions:
    """Return the model's search options, with the changes from the command line.

    Only the model's config is read, so that errors appear before torch and the model are loaded.
    """
    from captioner.inference.config_file import read_config, read_search
    from captioner.inference.find_model import find_model
    from captioner.inference.names import SHIPPED_MODEL
    from captioner.inference.reading import NO_KEYWORDS, READING
    from captioner.search.words import encode_search_words

    folder = find_model(models[0] if models else SHIPPED_MODEL)
    own, vocabulary = read_search(folder)
    search = own.changed(**given)
    if search.keywords and not read_config(folder).get(READING, {}).get("keywords"):
        raise ConfigError(f"--keywords is set, but {folder} {NO_KEYWORDS}")
    encode_search_words(search, vocabulary)
    return search
