"""The path of every request: its token, a place, its body, the handler, one reply, one line in the log."""
