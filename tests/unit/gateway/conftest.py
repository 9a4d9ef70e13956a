from tests.support.scripted_daemon import daemon, directory

__all__ = ["daemon", "directory"]
