"""Writes the parts of pages that follow from the code: `python -m tools.reference_pages [METRICS]`.

The tree of folders in ARCHITECTURE.md comes from the docstrings of packages, the table of errors from
`djinn_client/errors.py` and the statuses of the gateway. METRICS is a file with the answer of a gateway to
`/metrics`; the table of metrics is made from it. Tests compare all three with the pages.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from djinn_client import errors
from djinnd.gateway.http.errors import problem_of

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "tree": ROOT / "ARCHITECTURE.md",
    "errors": ROOT / "docs/reference/errors.md",
    "metrics": ROOT / "docs/reference/metrics.md",
}
TOOLS = ("djinnctl", "bench", "checkpoints", "demo", "results", "walk")
PACKAGES = ("djinn_client", "djinnd", *(f"tools/{name}" for name in TOOLS))


def tree() -> str:
    """Each folder with the first sentence of its package's docstring."""
    lines = [f"{'  ' * depth + name + '/':<22} {purpose}" for depth, name, purpose in _folders()]
    return "```\n" + "\n".join(lines) + "\n```"


def _folders() -> Iterator[tuple[int, str, str]]:
    for package in PACKAGES:
        for init in sorted((ROOT / package).rglob("__init__.py"), key=lambda path: path.parts[:-1]):
            inside = init.parent.relative_to(ROOT / package).parts
            yield len(inside), inside[-1] if inside else package, _purpose(init)


def _purpose(init: Path) -> str:
    told = " ".join((ast.get_docstring(ast.parse(init.read_text())) or "").split("\n\n")[0].split())
    return re.split(r"(?<=\.) ", told)[0].rstrip(".")


def error_table() -> str:
    """The classes in the order of the tree, with what its lines say and the status over HTTP."""
    meanings = dict(re.findall(r"^[ │├└─]*(\w+)  +(\S.*)$", errors.__doc__ or "", re.MULTILINE))
    rows = ["| error | code | over HTTP | meaning |", "|---|---|---|---|"]
    for depth, kind in _classes(errors.DjinnError, 0):
        status = problem_of(kind("")).status
        rows.append(f"| {'&emsp;' * depth}`{kind.__name__}` | `{kind.code}` | {status} | {meanings[kind.__name__]} |")
    return "\n".join(rows)


def _classes(kind: type[errors.DjinnError], depth: int) -> Iterator[tuple[int, type[errors.DjinnError]]]:
    for each in kind.__subclasses__():
        yield depth, each
        yield from _classes(each, depth + 1)


def metric_table(exposition: str) -> str:
    """The families of a gateway's `/metrics`, without those that prometheus_client adds to a counter."""
    rows = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    for family in sorted(text_string_to_metric_families(exposition), key=lambda family: family.name):
        labels = sorted({label for sample in family.samples for label in sample.labels} - {"le"})
        name = family.name + ("_total" if family.type == "counter" else "")
        if not name.endswith("_created"):
            rows.append(f"| `{name}` | {family.type} | {', '.join(labels)} | {family.documentation} |")
    return "\n".join(rows)


def filled(page: str, name: str, content: str) -> str:
    """The page with this content between the two marks of that name."""
    begin, end = f"<!-- {name}: made by tools/reference_pages.py -->", f"<!-- end of {name} -->"
    head, _, rest = page.partition(begin)
    _, found, tail = rest.partition(end)
    assert found, f"the page has no marks for {name}"
    return f"{head}{begin}\n{content}\n{end}{tail}"


def main() -> None:
    contents = {"tree": tree(), "errors": error_table()}
    if sys.argv[1:]:
        contents["metrics"] = metric_table(Path(sys.argv[1]).read_text())
    for name, content in contents.items():
        PAGES[name].write_text(filled(PAGES[name].read_text(), name, content))


if __name__ == "__main__":
    main()
