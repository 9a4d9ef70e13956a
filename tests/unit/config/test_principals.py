from __future__ import annotations

import pytest

from djinnd.config.principals import FIRST_NAMED, is_principal_name, is_unix_user, number_of


def test_a_name_has_one_number_for_ever() -> None:
    """It is in journals and page files: another function would give sessions to other names."""
    assert number_of("ci") == 10_865_159_293_231


def test_numbers_of_names_are_no_uids_and_every_reader_of_json_keeps_them() -> None:
    numbers = {number_of(f"name-{n}") for n in range(10_000)}
    assert len(numbers) == 10_000
    assert not any(map(is_unix_user, numbers)) and max(numbers) < 1 << 53
    assert is_unix_user(0) and is_unix_user(FIRST_NAMED - 2)


@pytest.mark.parametrize("name", ["a", "ci", "alice@laptop", "a.b_c-d", "Z" * 64])
def test_names_of_tokens_may_have_letters_digits_and_marks(name: str) -> None:
    assert is_principal_name(name)


@pytest.mark.parametrize("name", ["", "7", "1000", "-a", "a b", "a\n", "a\nuser=0", "é", "a" * 65, "a/b", "a,b", '"a"'])
def test_a_text_of_another_form_is_no_name(name: str) -> None:
    assert not is_principal_name(name)
