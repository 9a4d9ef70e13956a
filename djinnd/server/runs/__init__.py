"""Runs: a Generate or Forward on an engine, from its tokens to the reply, also over the loss of an engine."""
