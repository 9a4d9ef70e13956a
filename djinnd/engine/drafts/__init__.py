"""Guesses from a draft model: a small model that shares the tokenizer proposes the tokens that a step then verifies."""
