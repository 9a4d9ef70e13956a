from __future__ import annotations

from tests.support.serving import calm, daemon, folder, opened, serve, tiny, wire

__all__ = ["calm", "daemon", "folder", "opened", "serve", "tiny", "wire"]  # fixtures
