"""Checks of requests before an engine sees them: values in, a typed error or nothing out. No I/O."""
