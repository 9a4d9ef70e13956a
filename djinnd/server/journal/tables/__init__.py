"""The tables of the journal's file: rows with checksums, and the changes of sessions that end up in them."""
