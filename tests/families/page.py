"""Writes docs/families.md, a row for each model type that has a language model in transformers.

python -m tests.families.page                  # serves every reduced model and writes all rows: some minutes
python -m tests.families.page llama gemma3     # serves these, and keeps the other rows
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import transformers

from tests.families.configurations import causal_types, wrapper_types
from tests.families.one_family import Outcome, try_family

PAGE = Path(__file__).resolve().parents[2] / "docs" / "families.md"

_LONGROPE = "with `longrope`, up to `original_max_position_embeddings` tokens"
_INDEXERS = "up to `index_topk` tokens"
_INDEXED_BLOCKS = "with indexers, up to `index_topk_blocks` blocks"
NOTES = {  # limits of what is served
    "phi3": _LONGROPE,
    **dict.fromkeys(("axk2", "deepseek_v32", "glm_moe_dsa"), _INDEXERS),
    "dots3_note_text": f"with indexers, {_INDEXERS}",
    **dict.fromkeys(("minimax_m3_vl", "minimax_m3_vl_text"), _INDEXED_BLOCKS),
}

_HEAD = """# Model types

Every model type of transformers {version} that has a causal language model, alone or inside of a multimodal model.
`python -m tests.families.page` makes this page: it serves a reduced model of each type with random weights.

*Served* means: several sessions join and leave each other's batches, with prompts of 1 to 600 tokens. In float32 on the
CPU, all logits equal transformers' within 1e-4 of the largest one, and the greedy tokens are its likeliest ones.
*Refused* gives djinnd's own message, before a weight is read. *Not tried* means that transformers
itself does not run the reduced model or its default configuration.
Needs of single families: [families](reference/families.md).
"""


def read_page() -> tuple[str, dict[str, Outcome]]:
    """→ the version of transformers on the page, and the outcome of each model type."""
    text = PAGE.read_text()
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    outcomes = {row[0].strip("`"): Outcome(row[1] == "served", _reason(row)) for row in rows}
    return text.split("transformers ", 1)[1].split()[0], outcomes


def _reason(row: list[str]) -> str:
    return row[2].removesuffix(" |").strip() if len(row) > 2 and row[1] != "served" else ""


def run(model_type: str) -> Outcome:
    """Serves the reduced model of a type; the reason as the page has it."""
    with tempfile.TemporaryDirectory() as folder:
        outcome = try_family(model_type, Path(folder))
    return Outcome(outcome.served, in_a_cell(outcome.reason))


def in_a_cell(text: str) -> str:
    """The text in one line that a table may hold."""
    line = " ".join(text.replace("|", "/").split())
    return line if len(line) <= 240 else f"{line[:239]}…"


def main(chosen: list[str]) -> None:
    kept = read_page()[1] if chosen else {}
    for model_type in chosen or [*causal_types(), *wrapper_types()]:
        kept[model_type] = run(model_type)
        print(model_type, kept[model_type], flush=True)
    _write(kept)


def _write(outcomes: dict[str, Outcome]) -> None:
    parts = [_HEAD.format(version=transformers.__version__)]
    for title, types in (("Language models", causal_types()), ("Multimodal models", wrapper_types())):
        served = sum(outcomes[each].served for each in types)
        parts.append(f"\n## {title}\n\n{served} of {len(types)} are served.\n\n| model type | | |\n|---|---|---|\n")
        parts += [_row(each, outcomes[each]) for each in types]
    PAGE.write_text("".join(parts))


def _row(model_type: str, outcome: Outcome) -> str:
    state = "served" if outcome.served else "not tried" if outcome.reason.startswith("not tried") else "refused"
    says = NOTES.get(model_type, "") if outcome.served else outcome.reason
    return f"| `{model_type}` | {state} | {says} |\n"


if __name__ == "__main__":
    main(sys.argv[1:])
