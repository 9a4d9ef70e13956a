"""The values inside requests and replies: sampling, classes, edits, chats. No I/O."""
