"""The search for captions: beam search, sampling, and the rules and rewards for words."""
