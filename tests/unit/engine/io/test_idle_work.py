from __future__ import annotations

from djinnd.engine.io.idle_work import IdleWork


def test_every_part_runs_in_order_whatever_the_others_have_to_do() -> None:
    ran: list[str] = []

    def part(name: str, more: bool | None) -> bool | None:
        ran.append(name)
        return more

    work = IdleWork([lambda: part("a", True), lambda: part("b", None), lambda: part("c", False)])
    assert work.run() is True and ran == ["a", "b", "c"]
    assert IdleWork([lambda: part("d", None)]).run() is False


def test_work_is_expected_in_the_turn_after_one_in_which_it_ran() -> None:
    work = IdleWork([])
    work.turn()
    assert not work.has_run and not work.is_expected
    work.run()
    assert work.has_run and not work.is_expected
    work.turn()
    assert work.is_expected and not work.has_run
    work.turn()
    assert not work.is_expected
