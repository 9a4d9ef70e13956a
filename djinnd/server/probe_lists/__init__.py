"""The edits and breakpoints of a session, as the server stores them. No I/O."""
