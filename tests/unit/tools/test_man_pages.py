"""Man pages that follow from click's declarations."""

from __future__ import annotations

import re

from djinnctl.cli import main as djinnctl
from tools.man_pages import pages

REQUESTS = {".TH", ".SH", ".B", ".TP", ".PP", ".nf", ".fi"}


def test_every_command_has_a_page_with_its_options() -> None:
    made = dict(pages())
    assert {f"djinnctl-{name}.1" for name in djinnctl.commands} | {"djinnctl.1", "djinnd.8"} <= made.keys()
    assert "djinnctl-token-add.1" in made
    assert ".B djinnctl plan\n[OPTIONS] MODEL\n" in made["djinnctl-plan.1"]
    assert ".B \\-\\-memory SIZE\n" in made["djinnctl-plan.1"]
    assert ".B \\-\\-http ADDRESS\n" in made["djinnd.8"]


def test_a_line_of_a_page_is_text_or_a_request_that_roff_knows() -> None:
    for name, page in pages():
        for line in page.splitlines():
            assert not re.match(r"[.']", line) or line.split()[0] in REQUESTS, (name, line)
        assert page.startswith(".TH ") and "\n.SH NAME\n" in page, name
