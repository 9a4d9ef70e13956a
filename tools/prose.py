"""Checks the English of docstrings, comments, test names and pages: `python -m tools.prose [FOLDER OR FILE ...]`.

Without arguments it checks the places of CLEAN, which CI holds at zero findings.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
CLEAN = (
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "client/README.md",
    "CONTRIBUTING.md",
    "djinn_client",
    "djinnd",
    "docs",
    "README.md",
    "tests",
    "tools",
)

MOST_WORDS = 35  # of a sentence

_RELATIVE = r"(?:who|whose|whoever|what|whatever|those)"
_SENTENCE = re.compile(r"(?<=[.:;?!])\s+|\n\s*\n|\n\s*[-*|] ")
_CODE = re.compile(r"``.*?``|`[^`]*`", re.DOTALL)
_LISTING = re.compile(r"^\s*```.*?^\s*```|^ {4}.*?$|^\|.*?$|^<.*?$", re.DOTALL | re.MULTILINE)
# Each pattern sees one sentence.
_PATTERNS = {
    "a relative clause as the subject": re.compile(rf"^{_RELATIVE}\b(?!.*\?$)", re.IGNORECASE),
    "a relative clause without a noun": re.compile(
        r"\b(?:of|to|for|by|from|than|and|or|with|while|where|if|as|beside|before|after|until) (?:who|whoever|whose)\b"
    ),
    "a pronoun for a person, where a session or a request is meant": re.compile(
        r"\b(?:nobody|somebody|anybody|everybody)\b", re.IGNORECASE
    ),
}
_CONTINUES = re.compile(r"^(?:of|and|but|nor|so|that|which|as|until|than)\b", re.IGNORECASE)
_TEST = re.compile(rf"\s*(?:async )?def test_(?:but|and|nor|so|or|{_RELATIVE})_")


class Finding(NamedTuple):
    path: Path
    line: int
    fault: str
    text: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.fault}: {self.text[:100]}"


class Passage(NamedTuple):
    line: int
    text: str
    is_docstring: bool


def passages(path: Path) -> Iterator[Passage]:
    """Docstrings and comments of a Python file, paragraphs of a page. A comment over several lines is one passage."""
    source = path.read_text()
    if path.suffix != ".py":
        prose = _LISTING.sub(lambda found: "\n" * found[0].count("\n"), source)
        line = 1
        for paragraph in prose.split("\n\n"):
            yield Passage(line, paragraph, False)
            line += paragraph.count("\n") + 2
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield Passage(node.body[0].lineno, _LISTING.sub("", text), True)
    yield from _comments(source)


def _comments(source: str) -> Iterator[Passage]:
    """Whole-line comments that follow each other are one passage; a comment behind code is a passage of its own."""
    begun, last, text = 0, 0, ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        row, words = token.start[0], token.string.lstrip("#: ")
        is_whole_line = token.line.lstrip().startswith("#")
        if is_whole_line and row == last + 1:
            text += " " + words
        else:
            yield Passage(begun, text, False)
            begun, text = row, words
        last = row if is_whole_line else 0
    yield Passage(begun, text, False)


def check_passage(passage: Passage) -> Iterator[tuple[str, str]]:
    """→ pairs: the fault, and the sentence that has it."""
    text = _CODE.sub("CODE", passage.text)
    if passage.is_docstring and _CONTINUES.match(text):
        yield "a docstring that continues the name", text
    for sentence in (" ".join(each.split()) for each in _SENTENCE.split(text)):
        if len(sentence.split()) > MOST_WORDS:
            yield f"a sentence of {len(sentence.split())} words (at most {MOST_WORDS})", sentence
        for fault, pattern in _PATTERNS.items():
            if pattern.search(sentence):
                yield fault, sentence


def check_file(path: Path) -> Iterator[Finding]:
    for passage in passages(path):
        for fault, text in check_passage(passage):
            yield Finding(path, passage.line, fault, text)
    if path.name.startswith("test_") and path.suffix == ".py":
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if _TEST.match(line):
                yield Finding(path, number, "a test's name that is no statement", line.strip())


def files_of(places: list[str]) -> Iterator[Path]:
    for place in places:
        path = ROOT / place
        if path.is_dir():
            yield from sorted(each for each in path.rglob("*") if each.suffix in (".py", ".md"))
        else:
            yield path


def main() -> int:
    findings = [finding for path in files_of(sys.argv[1:] or list(CLEAN)) for finding in check_file(path)]
    for finding in findings:
        print(finding)
    print(f"{len(findings)} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
