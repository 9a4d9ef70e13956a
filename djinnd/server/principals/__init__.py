"""The principals of requests: tokens, the principals that they stand for, and the names of principals.
docs/guide/tokens.md."""
