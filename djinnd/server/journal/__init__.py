"""The journal: an SQLite file with each session's tokens, edits and records, which survives the daemon."""
