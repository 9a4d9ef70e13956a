"""`python -m tests.support.short_copies MODULE …`: a bench as a command, whose measurement of the bus copies little.

Copies that no cache holds take seconds, for figures that no test looks at. The measurement is a process of its own as
ever, by the bench's own call, and is told alike.
"""

from __future__ import annotations

import runpy
import subprocess
import sys
from typing import Any

from tools.bench import bus

BYTES = 8 << 20
_HERE, _BUS = "tests.support.short_copies", "tools.bench.bus"


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
