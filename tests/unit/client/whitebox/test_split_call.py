"""One call made in parts gives what it would have given in one."""

from __future__ import annotations

from typing import Any

import pytest

from djinn_client.errors import InvalidRequest
from djinn_client.protocol import Generate, Generated, Logprobs, Sampling, Timings, Usage
from djinn_client.protocol.fields.breakpoints import HitInfo
from djinn_client.whitebox import split_call as parts_module
from djinn_client.whitebox.split_call import SplitCall, expect_splittable

AT = HitInfo(breakpoint=1, point="blocks.1", block=2, first=0, end=3, prompt_end=3)


def generated(text: str = "", tokens: list[int] | None = None, **fields: Any) -> Generated:
    given: dict[str, Any] = {
        "id": 1,
        "finish_reason": "breakpoint",
        "hit": AT,
        "usage": Usage(),
        "timings": Timings(),
        "token_ids": [ord(text[-1])] if tokens is None and text else tokens or [],
    }
    return Generated(text=text, **given | fields)


def joined(*texts: str, **request: Any) -> SplitCall:
    """One token each, up to a stop string."""
    split = SplitCall(Generate(id=1, session="s", **request))
    for text in texts:
        assert not split.ended
        split.add(generated(text, [7]))
    return split


def test_each_part_is_asked_for_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(parts_module.time, "monotonic", lambda: now[0])
    sampling = Sampling(temperature=0.5, seed=3)
    request = Generate(
        id=1,
        session="s",
        text="prompt",
        max_tokens=9,
        stop=["."],
        stop_token_ids=[4],
        sampling=sampling,
        expected_tokens=1,
        deadline_s=2.0,
        logprobs=2,
    )
    split = SplitCall(request)
    assert split.next() is request
    split.add(generated())
    now[0] += 0.5
    second = split.next()
    assert (second.text, second.token_ids, second.resume) == (None, None, True)
    assert (second.max_tokens, second.stop, second.expected_tokens, second.deadline_s) == (9, ["."], 1, 1.5)
    assert (second.sampling, second.stop_token_ids, second.logprobs) == (sampling, [4], 2)
    split.add(generated("ab", [5, 6]))
    now[0] += 5.0
    third = split.next()
    assert (third.max_tokens, third.stop, third.expected_tokens) == (7, [], 0)
    assert 0 < third.deadline_s < 0.1, "it is late, which is not: without a deadline"


def test_without_a_deadline_there_is_none_later() -> None:
    assert joined("a").next().deadline_s == 0


def test_a_call_that_goes_on_from_a_hit_is_gone_on_with_from_the_next() -> None:
    """It does not continue from the first hit again."""
    assert joined("a", resume=True, hit=AT).next().hit is None


def test_the_replies_of_the_parts_are_joined_to_one() -> None:
    split = SplitCall(Generate(id=1, session="s", logprobs=0))
    first = Usage(prompt_tokens=3, generated_tokens=0, session_tokens=3, computed_tokens=2)
    split.add(generated(usage=first, timings=Timings(queued=0.25, first_token=0.0, total=1.0)))
    second = Usage(prompt_tokens=0, generated_tokens=1, session_tokens=4, computed_tokens=3)
    split.add(generated("a", usage=second, timings=Timings(0.125, 0.5, 2.0), logprobs=[Logprobs(-1.0)]))
    third = Usage(prompt_tokens=0, generated_tokens=1, session_tokens=5, computed_tokens=1)
    end = {"finish_reason": "length", "hit": None}
    split.add(generated("b", usage=third, timings=Timings(0.0, 0.25, 4.0), logprobs=[Logprobs(-2.0)], **end))
    whole = split.whole()
    assert (whole.text, whole.token_ids, whole.finish_reason, whole.hit) == ("ab", [97, 98], "length", None)
    assert whole.logprobs == [Logprobs(-1.0), Logprobs(-2.0)]
    assert whole.usage == Usage(prompt_tokens=3, generated_tokens=2, session_tokens=5, computed_tokens=2)
    assert whole.timings == Timings(queued=0.25, first_token=1.5, total=7.0)


@pytest.mark.parametrize(
    ("texts", "stops", "text"),
    [
        (["a", "\n", "\n"], ["\n\n"], "a"),
        (["wh", "en", "ever"], ["x", "ene"], "wh"),  # cut within a part
        (["aa", "b"], ["aab", "b"], ""),  # both end with the b
        (["a", "bcd"], ["cd", "abc"], ""),  # the first that is complete
        (["ab", "ab", "c"], ["abc"], "ab"),
        (["", "", "end"], ["end"], ""),  # tokens without text came before it
    ],
)
def test_stop_strings_over_parts(texts: list[str], stops: list[str], text: str) -> None:
    split = joined(*texts, stop=stops)
    whole = split.whole()
    assert (split.ended, whole.text, whole.finish_reason, whole.hit) == (True, text, "stop", None)
    assert len(whole.token_ids) == len(texts)


def test_a_stop_string_that_is_not_there() -> None:
    split = joined("a", "b", "a", stop=["bb", "ac"])
    assert not split.ended and split.whole().text == "aba" and split.whole().hit is AT


@pytest.mark.parametrize(
    ("texts", "text"),
    [
        (["a\ufffd", "\u00e9"], "a\u00e9"),
        (["\ufffd", "", "\u4e2d"], "\u4e2d"),
        (["\ufffd", "\ufffd", "\u4e2d"], "\u4e2d"),
        (["\ufffd", "x"], "\ufffdx"),  # it was broken
        (["\ufffd", "\ufffd", "x"], "\ufffd\ufffdx"),
    ],
)
def test_a_character_over_parts(texts: list[str], text: str) -> None:
    assert joined(*texts).whole().text == text


def test_a_stop_string_behind_a_character_over_parts() -> None:
    split = joined("\ufffd", "\u00e9", ".", stop=["\u00e9."])
    assert split.ended and split.whole().text == ""


def test_a_split_call_refuses_presence_penalty() -> None:
    expect_splittable(Generate(id=1, session="s", sampling=Sampling(repetition_penalty=2.0)))
    with pytest.raises(InvalidRequest, match="presence_penalty"):
        expect_splittable(Generate(id=1, session="s", sampling=Sampling(presence_penalty=-0.5)))
