"""The commands by what they are about. Each reads through djinn_client and shows what it read."""
