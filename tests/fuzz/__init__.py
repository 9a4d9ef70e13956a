"""Coverage-guided fuzzing of everything that parses bytes of strangers: `make fuzz` (see __main__.py)."""
