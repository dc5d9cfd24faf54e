"""Words of captions: tokenizer, vocabulary and content words."""
