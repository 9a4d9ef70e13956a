"""Messages between the server and the engine, over their socket pair: typed structs in the wire protocol's frames.

The server numbers requests. The numbers are unique in the daemon and are not the client's ids. For each `Run` the
engine sends `Started` (inside `Stepping`), `Token`s (inside `Stepped`), and then exactly one `Finished`, `LogitsReady`
or `Failed`. Each other message with a `request` gets exactly one final reply. A message without a `request` is one-way.

A load asks for shared memory halfway, because only the engine knows the layout and only the server creates the arena:

    server ──Load──► engine ──NeedArena──► server ──ArenaReady──► engine ──Loading…──► Loaded
                                               └──ArenaRefused──► engine ──► Failed

The checkpoint is a path that the engine opens, or a set of open files that travel with the frame. When a client shares
its own weights, the server first asks for their layout (DescribeImage, answered by ImageDescribed). The ArenaReady of
such a model carries a descriptor of the client's image.

| module | contents |
|---|---|
| `engine` | the engine's start and exit, its memory budget, refusals |
| `models` | plan, load and unload a model |
| `adapters` | load and drop the LoRA adapters of a model |
| `inspections` | checks of a checkpoint in a confined child process, before the engine reads it |
| `arenas` | shared memory for weights and pages |
| `sessions` | open, fork, close and edit a session; export and import its KV |
| `runs` | a request that extends a session, and the tokens of each step |
| `scheduling` | classes, signals, pauses, tenants, and the reason why a session waits |
| `figures` | reports, and traces of steps |
| `directions` | the base classes: what the server sends, and what an engine sends |
| `protocol` | their encoding |
"""

from djinnd.messages.adapters import *  # noqa: F403
from djinnd.messages.arenas import *  # noqa: F403
from djinnd.messages.directions import *  # noqa: F403
from djinnd.messages.engine import *  # noqa: F403
from djinnd.messages.figures import *  # noqa: F403
from djinnd.messages.inspections import *  # noqa: F403
from djinnd.messages.models import *  # noqa: F403
from djinnd.messages.protocol import *  # noqa: F403
from djinnd.messages.runs import *  # noqa: F403
from djinnd.messages.scheduling import *  # noqa: F403
from djinnd.messages.sessions import *  # noqa: F403
