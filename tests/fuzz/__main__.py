"""`python -m tests.fuzz [--cases N] [--seed S] [NAME …]`: N cases in all, shared out among the targets.

Prints a line for each target, and exits with 1 where one has a finding: an exception that its parser does not document,
a case that takes longer than 10 s, or 2 GiB of memory. The input of a finding is kept in the folder that is printed;
`python -m tests.fuzz.target NAME FOLDER INPUT -runs=1` runs it again.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# Of 100 cases: cheap parsers of what comes over the network have most of them.
SHARES = {
    "frames": 23,
    "records": 10,
    "answers": 2,
    "requests": 35,
    "replies": 10,
    "checkpoints": 11,
    "gguf_files": 1,
    "quantised_files": 1,
    "arena_headers": 3.5,
    "saved_sessions": 3,
    "page_files": 0.4,
    "journals": 0.1,
}
SECONDS = 10  # a case
MEMORY = 2048  # MiB


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(SHARES))
    given = parser.parse_args()
    names = given.names or list(SHARES)
    whole = sum(SHARES[name] for name in names)
    findings, done = [], 0
    for name in names:
        cases = math.ceil(given.cases * SHARES[name] / whole)
        is_well, ran = run(name, cases, given.seed)
        done += ran
        findings += [] if is_well else [name]
    print(f"fuzzed {done:,} cases, seed {given.seed}: {len(findings)} findings {' '.join(findings)}".rstrip())
    return 1 if findings else 0


def run(name: str, cases: int, seed: int) -> tuple[bool, int]:
    """→ whether there is no finding, and the cases that ran."""
    folder = Path(tempfile.mkdtemp(prefix=f"djinnd-fuzz-{name}-"))
    options = [f"-runs={cases}", f"-seed={seed}", f"-timeout={SECONDS}", f"-rss_limit_mb={MEMORY}", "-max_len=4096"]
    command = [sys.executable, "-m", "tests.fuzz.target", name, str(folder / "corpus"), *options]
    began = time.monotonic()
    with (folder / "log").open("wb") as log:
        environ = os.environ | {"TMPDIR": str(folder)}
        status = subprocess.run(
            [*command, f"-artifact_prefix={folder}/"], stdout=log, stderr=log, env=environ, check=False
        ).returncode
    text = (folder / "log").read_text(errors="replace")
    ran = max((int(count) for count in re.findall(r"^(?:Done |#)(\d+)", text, re.MULTILINE)), default=0)
    seconds = time.monotonic() - began
    print(f"{name:15} {ran:>9,} cases in {seconds:6.1f} s  {'ok' if status == 0 else f'FINDING: {folder}'}", flush=True)
    if status:
        print("\n".join(text.splitlines()[-25:]))
    else:
        shutil.rmtree(folder)
    return status == 0, ran


if __name__ == "__main__":
    sys.exit(main())
