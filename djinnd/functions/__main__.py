"""`python -m djinnd.functions`: the server starts it, for one tenant, and holds the other end of the socket."""

from __future__ import annotations

import tempfile

from djinnd import interventions
from djinnd.confinement import sandbox
from djinnd.confinement.child import begin


def main() -> None:
    child = begin(__doc__)

    import cloudpickle  # noqa: F401  # what functions are unpickled with
    import torch

    from djinnd.functions.serving import Serving, channel_to_server, rehearse

    tempfile.tempdir = "/tmp"  # parts of torch ask for its name when they are imported; nobody can write there
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    rehearse()
    channel = channel_to_server(child.server)
    lacking = sandbox.missing()
    if lacking:
        channel.send(interventions.Unfit(lacking))
        return
    sandbox.close(child.user, child.parent, child.memory)
    channel.send(interventions.Ready())
    Serving(child.memory).serve(channel)


if __name__ == "__main__":
    main()
