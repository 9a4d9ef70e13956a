"""How many descriptors this process may have: each connection takes one, and many systems begin with 1,024."""

from __future__ import annotations

import resource

_WANTED = 1 << 16


def allow_many() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED if hard == resource.RLIM_INFINITY else min(hard, _WANTED)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
