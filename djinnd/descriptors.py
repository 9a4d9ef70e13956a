"""Raises the limit on open descriptors: each connection takes one, and the default on many systems is 1,024."""

from __future__ import annotations

import resource

_WANTED = 1 << 16


def allow_many() -> None:
    """Raises the soft limit to _WANTED, or to the hard limit if that is lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED if hard == resource.RLIM_INFINITY else min(hard, _WANTED)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
