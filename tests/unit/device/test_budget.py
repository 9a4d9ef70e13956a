from __future__ import annotations

import pytest

from djinn_client.errors import OutOfMemory
from djinnd.device.budget import MemoryBudget, at_least, gib


def test_reservations_add_up() -> None:
    budget = MemoryBudget(100)
    budget.reserve("a", 30)
    budget.reserve("b", 70)
    assert (budget.used, budget.free) == (100, 0)
    budget.release("a")
    assert (budget.used, budget.free) == (70, 30)
    budget.check_integrity()


def test_too_much_is_refused_with_the_figures_and_changes_nothing() -> None:
    budget = MemoryBudget(3 << 30)
    budget.reserve("weights", 2 << 30)
    message = r"KV needs 1\.50 GiB of device memory; 1\.00 GiB of the budget of 3\.00 GiB is free: unload a model"
    with pytest.raises(OutOfMemory, match=message) as told:
        budget.reserve("KV", 3 << 29)
    assert told.value.data == {"needed": 3 << 29, "free": 1 << 30, "budget": 3 << 30}
    assert budget.used == 2 << 30
    budget.reserve("KV", 1 << 30)


def test_a_label_is_reserved_once_and_released_once() -> None:
    budget = MemoryBudget(10)
    budget.reserve("a", 1)
    with pytest.raises(AssertionError):
        budget.reserve("a", 1)
    budget.release("a")
    with pytest.raises(KeyError):
        budget.release("a")


@pytest.mark.parametrize(("nbytes", "text"), [(0, "0.0 MiB"), (1 << 20, "1.0 MiB"), (5 << 29, "2.50 GiB")])
def test_bytes_are_formatted_for_people(nbytes: int, text: str) -> None:
    assert gib(nbytes) == text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (289_941_913, "276.6 MiB"),
        (276 << 20, "276.0 MiB"),
        ((276 << 20) + 1, "276.1 MiB"),
        (1 << 30, "1.00 GiB"),
        ((1 << 30) + 1, "1.01 GiB"),
        ((1 << 30) - 1, "1.00 GiB"),
    ],
)
def test_a_figure_to_provide_is_rounded_up(nbytes: int, text: str) -> None:
    assert at_least(nbytes) == text


def test_a_budget_shrinks_to_what_is_in_use_and_grows() -> None:
    budget = MemoryBudget(100)
    budget.reserve("a", 60)
    budget.resize(60)
    assert (budget.total, budget.free) == (60, 0)
    with pytest.raises(OutOfMemory, match=r"is less than the .* that are in use") as told:
        budget.resize(59)
    assert told.value.data == {"needed": 60, "budget": 59} and budget.total == 60
    budget.resize(200)
    assert budget.free == 140


def test_a_reservation_gets_another_size_or_stays_as_it_is() -> None:
    budget = MemoryBudget(100)
    budget.reserve("a", 40)
    budget.reserve("b", 50)
    budget.change("a", 50)
    assert budget.free == 0
    with pytest.raises(OutOfMemory, match="a needs"):
        budget.change("a", 51)
    assert budget.used == 100
    budget.change("a", 0)
    assert budget.free == 50
    budget.check_integrity()


def test_a_reservation_takes_another_name() -> None:
    budget = MemoryBudget(100)
    budget.reserve("old", 60)
    budget.reserve("other", 10)
    with pytest.raises(AssertionError):
        budget.rename("old", "other")
    budget.rename("old", "new")
    assert budget.used == 70
    budget.release("new")
    assert budget.used == 10
