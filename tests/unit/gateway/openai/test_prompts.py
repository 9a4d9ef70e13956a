from __future__ import annotations

import pytest

from djinnd.gateway.http.errors import HttpError
from djinnd.gateway.openai.prompts import Prompt, prompts_of


def test_prompts_may_be_texts_tokens_or_lists_of_both():
    assert prompts_of("a") == [Prompt("a", None)]
    assert prompts_of([1, 2]) == [Prompt(None, [1, 2])]
    assert prompts_of(["a", [1]]) == [Prompt("a", None), Prompt(None, [1])]
    for wrong in ([], [1, "a"], [1, [1]]):
        with pytest.raises(HttpError):
            prompts_of(wrong)
