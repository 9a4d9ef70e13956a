"""The bench of agents: sessions that wait for tools, with and without signals to the daemon."""
