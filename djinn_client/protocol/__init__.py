"""The wire contract: frames, requests and replies, and the values inside them. No I/O.

The clients, the server, the gateway and the fuzzer import this package, which offers the names of all its modules.
"""

from djinn_client.protocol.fields.breakpoints import *  # noqa: F403
from djinn_client.protocol.fields.chat import *  # noqa: F403
from djinn_client.protocol.fields.conversations import Conversation as Conversation
from djinn_client.protocol.fields.conversations import RecordInfo as RecordInfo
from djinn_client.protocol.fields.edits import *  # noqa: F403
from djinn_client.protocol.fields.output_format import OutputFormat as OutputFormat
from djinn_client.protocol.fields.placing import ModelPlan as ModelPlan
from djinn_client.protocol.fields.placing import Placing as Placing
from djinn_client.protocol.fields.sampling import *  # noqa: F403
from djinn_client.protocol.fields.scheduling import CLASSES as CLASSES
from djinn_client.protocol.fields.scheduling import Class as Class
from djinn_client.protocol.fields.signals import *  # noqa: F403
from djinn_client.protocol.frames import *  # noqa: F403
from djinn_client.protocol.info import *  # noqa: F403
from djinn_client.protocol.replies import *  # noqa: F403
from djinn_client.protocol.requests import *  # noqa: F403
