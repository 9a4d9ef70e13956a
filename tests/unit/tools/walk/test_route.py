from __future__ import annotations

from tools.walk.route import Event, Route, route


def walked(*paths: str) -> Route:
    return route(Event(at, 1, "prompt", "call", path, "f") for at, path in enumerate(paths))


def test_calls_within_one_file_are_one_stay() -> None:
    assert walked("a", "a", "b", "b") == Route(["a", "b"])


def test_a_file_that_was_left_before_counts_once_as_a_file_and_each_time_as_a_return() -> None:
    there_and_back = walked("a", "b", "a", "b", "a")
    assert (there_and_back.distinct, there_and_back.returns) == (2, 3)


def test_a_walk_without_events_has_no_files() -> None:
    assert (walked().distinct, walked().returns) == (0, 0)


def test_processes_at_work_at_the_same_time_are_walked_one_after_the_other() -> None:
    events = [
        Event(at, pid, "prompt", "call", path, "f") for at, (pid, path) in enumerate([(1, "a"), (2, "b"), (1, "a")])
    ]
    assert route(events) == Route(["a", "b"])


def test_the_token_is_followed_after_the_prompt() -> None:
    steps = [("prompt", "a"), ("token", "b"), ("prompt", "a")]
    assert route(Event(at, 1, value, "call", path, "f") for at, (value, path) in enumerate(steps)) == Route(["a", "b"])
