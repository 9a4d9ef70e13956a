from __future__ import annotations

import pytest

from djinnctl.layout import Group, Renderable, Span, columns, cut, line, lines_of, new_table, shown


def text(renderable: Renderable, width: int) -> list[str]:
    return [shown(each, colours=False) for each in lines_of(renderable, width)]


def test_a_table_is_as_wide_as_it_takes() -> None:
    table = new_table("NAME", "BYTES>")
    table.add_row("a", "12")
    table.add_row("longer", Span("1", "red"))
    assert text(table, 100) == ["NAME   BYTES", "a         12", "longer     1"]


def test_a_table_that_is_too_wide_is_cut_where_it_yields() -> None:
    table = new_table("ID", "NAME", "STATE")
    table.columns[0] = table.columns[0]._replace(yields=0)
    table.columns[1] = table.columns[1]._replace(yields=2)
    table.add_row("0123456789", "a long name", "running")
    assert text(table, 25)[1] == "0123456789 a lon… running"
    assert text(table, 15)[1] == "0123456789 … r…"
    assert text(table, 3)[1] == "0123456789 … …", "no further"


def test_texts_wrap_at_spaces_and_keep_their_styles() -> None:
    long = line(Span("one two", "bold"), " three ", Span("4", "red"))
    assert text(long, 9) == ["one two", "three 4"]
    assert [shown(each, colours=True) for each in lines_of(long, 9)] == [
        "\x1b[1mone two\x1b[0m",
        "three \x1b[31m4\x1b[0m",
    ]
    assert text("abcdefgh ij", 4) == ["abcd", "efgh", "ij"]
    assert text(Group("a\nb", "", Span("c")), 10) == ["a", "b", "", "c"]


@pytest.mark.parametrize(("whole", "width", "part"), [("abc", 3, "abc"), ("abcd", 3, "ab…"), ("模型名", 5, "模型…")])
def test_text_that_does_not_fit_ends_in_an_ellipsis(whole: str, width: int, part: str) -> None:
    assert cut(whole, width) == part
    assert columns(part) <= width
