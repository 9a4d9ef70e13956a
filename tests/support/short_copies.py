"""`python -m tests.support.short_copies MODULE …`: runs a bench with a short measurement of the bus.

The real measurement copies more than any cache holds, which takes seconds, and no test looks at its figures. It still
runs in a process of its own, by the bench's own call, and its result is reported the same way.
"""

from __future__ import annotations

import runpy
import subprocess
import sys
from typing import Any

from tools.bench.harness import bus

BYTES = 8 << 20
_HERE, _BUS = "tests.support.short_copies", "tools.bench.harness.bus"


def main() -> None:
    module = sys.argv[1]
    del sys.argv[1]
    if module == _BUS:
        vars(bus)["_run_bytes"] = lambda device: BYTES
        bus.main()
        return
    plain = subprocess.run

    def run(command: list[str], **options: Any) -> Any:
        measures = command[1:3] == ["-m", _BUS]
        return plain([command[0], "-m", _HERE, *command[2:]] if measures else command, **options)

    vars(subprocess)["run"] = run
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
