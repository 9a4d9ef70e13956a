"""`python -m djinnd.functions`: an intervention process. The server starts one for each tenant."""

from __future__ import annotations

import tempfile

from djinnd.confinement import sandbox
from djinnd.confinement.child import begin
from djinnd.jobs import sandbox as interventions


def main() -> None:
    child = begin(__doc__)

    import cloudpickle  # noqa: F401  # unpickling a function needs it, and nothing can be imported later
    import torch

    from djinnd.functions.serving import FunctionService, channel_to_server, rehearse

    tempfile.tempdir = "/tmp"  # torch asks for the folder's name at import; the sandbox prevents writing there
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    rehearse()
    channel = channel_to_server(child.server)
    lacking = sandbox.missing()
    if lacking:
        channel.send(interventions.FunctionsReady(lacking))
        return
    sandbox.close(child.user, child.parent, child.memory)
    channel.send(interventions.FunctionsReady())
    FunctionService(child.memory).serve(channel)


if __name__ == "__main__":
    main()
