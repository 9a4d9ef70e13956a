"""Text and tokens: a checkpoint's tokenizer, the text of a growing output, stop strings. No I/O beyond reading files.

The server uses it for configured models, and text workers for all others.
"""
