"""Pages that follow from the code are as the code is now."""

from __future__ import annotations

import pytest

from tools.reference_pages import PAGES, error_table, filled, metric_table, tree

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


def test_a_metric_is_a_row_with_its_labels() -> None:
    assert metric_table(EXPOSITION).splitlines()[2:] == [
        "| `djinnd_queued_seconds` | histogram | class | From the call to its first row. |",
        "| `djinnd_steps_total` | counter |  | Steps that the engine has run. |",
    ]
