from __future__ import annotations

from collections.abc import Sequence

import pytest

from djinnd.text.stop_strings import StopMatcher


def run(stops: Sequence[str], texts: Sequence[str]) -> tuple[list[str], StopMatcher]:
    matcher = StopMatcher(stops)
    return [matcher.feed(text) for text in texts], matcher


def test_without_stop_strings_all_is_told_at_once():
    told, matcher = run([], ["a", "", "bc"])
    assert told == ["a", "", "bc"]
    assert matcher.matched is None
    assert matcher.finish("d") == "d"


def test_the_possible_beginning_of_a_stop_string_is_held_back():
    told, matcher = run(["abab!"], ["xa", "b", "a", "b", "a", "c"])
    assert told == ["x", "", "", "", "ab", "abac"]
    assert matcher.matched is None


def test_the_text_before_the_stop_string_is_told_and_none_after():
    told, matcher = run(["END"], ["one E", "N", "D two", " three"])
    assert told == ["one ", "", "", ""]
    assert matcher.matched == "END"
    assert matcher.finish("four") == ""


def test_a_stop_string_inside_one_piece_ends_the_text():
    told, matcher = run(["\n\n"], ["a\nb\n\nc"])
    assert told == ["a\nb"] and matcher.matched == "\n\n"


def test_pieces_without_text_change_nothing():
    told, matcher = run(["ab"], ["", "a", "", "b", ""])
    assert not any(told) and matcher.matched == "ab"


def test_the_end_tells_what_was_held():
    told, matcher = run(["abc"], ["xab"])
    assert told == ["x"]
    assert matcher.finish() == "ab"
    assert matcher.finish() == ""
    assert matcher.matched is None


def test_the_rest_of_the_detokenizer_may_complete_a_stop_string():
    told, matcher = run(["a\ufffd"], ["xa"])
    assert told == ["x"]
    assert matcher.finish("\ufffd") == ""
    assert matcher.matched == "a\ufffd"


@pytest.mark.parametrize("cut", range(1, 4))
def test_first_complete_wins_however_it_is_cut(cut: int):
    text = "abcd"
    told, matcher = run(["abcd", "bc"], [text[:cut], text[cut:]])
    assert "".join(told) == "a" and matcher.matched == "bc"


def test_of_those_that_end_together_the_longest_wins():
    for stops in (["bc", "abc", "c"], ["c", "bc", "abc"]):
        told, matcher = run(stops, ["x", "ab", "c"])
        assert told == ["x", "", ""] and matcher.matched == "abc"


def test_after_a_false_start_the_next_is_found():
    told, matcher = run(["aab"], ["a", "a", "a", "b"])
    assert "".join(told) == "a" and matcher.matched == "aab"


def test_stop_strings_of_many_bytes_a_character():
    told, matcher = run(["終わり"], ["はい", "終", "わ", "り"])
    assert told == ["はい", "", "", ""] and matcher.matched == "終わり"


def test_an_empty_stop_string_is_our_fault():
    with pytest.raises(AssertionError):
        StopMatcher(["a", ""])
