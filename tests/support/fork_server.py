"""`python -m tests.support.fork_server`: a fork server for scripted engines. It is ready at once, because its imports
are few."""

from __future__ import annotations

from djinnd.engine.fork_server import main

if __name__ == "__main__":
    main(["posix_ipc"])
