"""HTTP itself, without the daemon: sockets, connections, errors, and how a reply goes out."""
