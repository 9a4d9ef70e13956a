"""`python -m tests.support.nursery`: a nursery for scripted engines. It is ready at once, because its imports
are few."""

from __future__ import annotations

from djinnd.engine.nursery import main

if __name__ == "__main__":
    main(["posix_ipc"])
