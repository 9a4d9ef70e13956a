from tests.support.remote_door import door
from tests.support.scripted_daemon import daemon, directory

__all__ = ["daemon", "directory", "door"]
