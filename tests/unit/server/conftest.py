from __future__ import annotations

from tests.support.serving import calm, folder, serve, tiny

__all__ = ["calm", "folder", "serve", "tiny"]  # fixtures
