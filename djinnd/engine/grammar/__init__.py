"""Outputs that follow a grammar: the processes that compute masks, and the tokens that grammars force."""
