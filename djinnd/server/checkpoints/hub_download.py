"""`python -m djinnd.server.checkpoints.hub_download HUB_ID PARENT`: downloads a model from the hub. The server may kill
it.

Prints `folder PATH` or `error TEXT`. The output of the library goes to standard error.
"""

from __future__ import annotations

import os
import sys

from djinnd.lifeline import tie_to

FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "tokenizer.model", "*.jinja"]  # no pickles, no code
_MOST_TOLD = 2000  # characters of the library's message


def fetch(hub_id: str) -> str:
    import huggingface_hub  # takes a second

    try:
        return f"folder {huggingface_hub.snapshot_download(hub_id, allow_patterns=FILES)}"
    except Exception as error:  # network, licence, disk, name: the library's message says which
        offline = os.environ.get("HF_HUB_OFFLINE")
        remedy = "HF_HUB_OFFLINE is set." if offline else "check the name, and the connection to the hub."
        told = str(error)[:_MOST_TOLD]
        return f"error {hub_id} could not be fetched from the hub ({remedy} Or give the folder of a copy): {told}"


def main() -> None:
    hub_id, parent = sys.argv[1:]
    tie_to(int(parent))
    answer = os.dup(1)
    os.dup2(2, 1)
    with open(answer, "w") as file:
        file.write(fetch(hub_id))


if __name__ == "__main__":
    main()
