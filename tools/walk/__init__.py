"""Follows one value through the code: `python -m tools.walk prompt` or `page` prints the files that it passes."""
