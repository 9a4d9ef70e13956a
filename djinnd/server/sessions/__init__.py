"""The table of sessions, and the conversations and records of programs without sessions."""
