"""Pages that follow from the code are as the code is now."""

from __future__ import annotations

import re

import pytest

from tools.reference_pages import PAGES, ROOT, error_table, filled, metric_table, tree

EXPOSITION = """\
# HELP djinnd_steps_total Steps that the engine has run.
# TYPE djinnd_steps_total counter
djinnd_steps_total 3.0
# HELP djinnd_queued_seconds From the call to its first row.
# TYPE djinnd_queued_seconds histogram
djinnd_queued_seconds_bucket{class="batch",le="+Inf"} 0.0
"""


@pytest.mark.parametrize(("name", "content"), [("errors", error_table), ("tree", tree)])
def test_a_page_has_what_the_code_says_now(name, content) -> None:
    page = PAGES[name].read_text()
    assert page == filled(page, name, content()), "run `python -m tools.reference_pages`"


def test_modules_that_the_design_names_are_there() -> None:
    folders = ("djinnd", "djinn_client", "tools", "tests")
    modules = [f"/{path.relative_to(ROOT)}" for folder in folders for path in ROOT.glob(f"{folder}/**/*.py")]
    for page in (PAGES["tree"], *ROOT.glob("docs/design/*.md")):
        named = re.findall(r"`([\w/]+\.py)`", page.read_text())
        assert [name for name in named if not any(module.endswith(f"/{name}") for module in modules)] == [], page


def test_a_metric_is_a_row_with_its_labels() -> None:
    assert metric_table(EXPOSITION).splitlines()[2:] == [
        "| `djinnd_queued_seconds` | histogram | class | From the call to its first row. |",
        "| `djinnd_steps_total` | counter |  | Steps that the engine has run. |",
    ]
