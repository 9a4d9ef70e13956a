from __future__ import annotations

from tests.support.serving import tiny

__all__ = ["tiny"]  # fixtures
