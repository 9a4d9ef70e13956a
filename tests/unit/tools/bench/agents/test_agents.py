from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from itertools import pairwise
from pathlib import Path
from statistics import fmean, pstdev

import click
import msgspec
import pytest

from djinn_client import ModelInfo
from tools.bench.agents.__main__ import crowd_of, ways_of, works_of
from tools.bench.agents.daemons import alone, expect_room, warm_up
from tools.bench.agents.figures import WORST, Late, alive, anew, figures, latest
from tools.bench.agents.loop import Answer, Course, Refused, Run, Turn
from tools.bench.agents.peer import Batched
from tools.bench.agents.plan import TOOLS, Wait, Work, drawn
from tools.bench.agents.results import PEER, REFERENCE, Results, Tried, summary, tables
from tools.bench.agents.sessions import Way
from tools.bench.harness.paged_model import without_text
from tools.bench.harness.usage import Traffic
from tools.bench.plot import by_agents, rates
from tools.bench.stream.outcome import Status

CLOSED = Work(agents=4, context=100, observation=8, answer=5, loops=3, tool_s=(10.0, 20.0))
OPEN = msgspec.structs.replace(CLOSED, agents=2000, loops=1, rate=0.2)
QUICK = msgspec.structs.replace(CLOSED, tool_s=(0.0, 0.0))


# --- the plan ---------------------------------------------------------------------------------------------------------


def test_the_same_work_draws_the_same_agents_and_another_seed_draws_others() -> None:
    assert drawn(CLOSED) == drawn(CLOSED)
    assert drawn(CLOSED) != drawn(msgspec.structs.replace(CLOSED, seed=1))


def test_times_between_arrivals_are_exponential() -> None:
    arrivals = [agent.arrives_s for agent in drawn(OPEN)]
    between = [after - before for before, after in pairwise([0.0, *arrivals])]
    assert min(between) > 0
    assert fmean(between) == pytest.approx(5.0, rel=0.1)
    assert pstdev(between) == pytest.approx(fmean(between), rel=0.1)  # a regular process has less deviation
    assert {agent.arrives_s for agent in drawn(CLOSED)} == {0.0}


def test_tool_times_are_uniform_and_each_tool_has_its_own_range() -> None:
    waits = [wait for agent in drawn(OPEN) for wait in agent.waits]
    assert all(10.0 <= wait.seconds < 20.0 for wait in waits)
    assert fmean(wait.seconds for wait in waits) == pytest.approx(15.0, rel=0.02)
    for number, tool in enumerate(TOOLS):
        times = [wait.seconds for wait in waits if wait.tool == tool]
        assert len(times) == pytest.approx(len(waits) / len(TOOLS), rel=0.15)
        assert 10 + number * 10 / len(TOOLS) <= min(times) < max(times) <= 10 + (number + 1) * 10 / len(TOOLS)


def test_the_tokens_of_an_agent_at_its_end_follow_from_its_work() -> None:
    assert (CLOSED.session_tokens, CLOSED.answers) == (100 + 1 + 3 * 13, 12)
    assert (OPEN.session_tokens, OPEN.answers) == (100 + 5 + 13, 4000)  # two answers each


# --- the loop ---------------------------------------------------------------------------------------------------------


class Echo:
    """A Server that answers at once, and refuses the calls with the numbers in `refused`."""

    def __init__(self, refused: Sequence[int] = ()) -> None:
        self.asked: list[tuple[int, int]] = []  # tokens, new
        self.waits: list[Wait] = []
        self.open = self.most = 0
        self._refused = refused

    async def begin(self) -> Echo:
        self.open += 1
        self.most = max(self.most, self.open)
        return self

    async def turn(self, tokens: Sequence[int], new: int) -> Answer:
        self.asked.append((len(tokens), new))
        number = len(self.asked)
        await asyncio.sleep(0)
        if number in self._refused:
            raise Refused("busy: come back")
        return Answer([float(number) for number in range(new)], len(tokens) + 1)

    def waiting(self, wait: Wait) -> AbstractAsyncContextManager[None]:
        self.waits.append(wait)
        return nullcontext()

    async def close(self) -> None:
        self.open -= 1


def lived(work: Work, server: Echo) -> tuple[Course, list[int]]:
    """Runs the work. Returns its course and the numbers of tokens that `count` was called with."""
    told: list[int] = []
    run = Run(work, server, lambda tokens: [0] * tokens, told.append)
    return asyncio.run(asyncio.wait_for(run(), 60)), told


def test_all_agents_of_a_crowd_have_asked_before_the_first_tool_begins() -> None:
    server = Echo()
    course, told = lived(QUICK, server)
    assert server.asked == [(100, 1)] * 4 + [(8, 5)] * 12
    assert sorted(server.waits) == sorted(wait for agent in drawn(QUICK) for wait in agent.waits)
    assert Counter(turn.number for turn in course.turns) == {0: 4, 1: 4, 2: 4, 3: 4}
    assert (server.most, server.open, len(course.lives), course.failures) == (4, 0, 4, [])
    assert max(told) == 101 and sum(told) == 0  # all tokens have gone at the end


def test_an_arriving_agent_gets_two_answers_and_leaves() -> None:
    work = msgspec.structs.replace(QUICK, agents=6, loops=1, rate=1000.0)
    server = Echo()
    course, _ = lived(work, server)
    assert Counter(server.asked) == {(100, 5): 6, (8, 5): 6}
    assert server.open == 0 and len(course.lives) == 6
    arrived = [began - course.began for began, _ in sorted(course.lives)]
    assert all(at >= agent.arrives_s for at, agent in zip(arrived, drawn(work), strict=True))


def test_an_agent_without_an_answer_gives_up_and_the_others_continue() -> None:
    course, told = lived(QUICK, Echo(refused=[2, 5]))  # one agent's question, another one's first answer
    assert sorted(failure.split(": ", 1)[1] for failure in course.failures) == ["busy: come back"] * 2
    assert len(course.turns) == 3 + 3 * 2 and len(course.lives) == 4 and sum(told) == 0


class Mute(Echo):
    """A server that stops answering after some answers."""

    def __init__(self, answers: int) -> None:
        super().__init__()
        self._answers = answers

    async def turn(self, tokens: Sequence[int], new: int) -> Answer:
        if len(self.asked) == self._answers:
            await asyncio.Event().wait()
        return await super().turn(tokens, new)


@pytest.mark.parametrize("answers", [2, 4, 9], ids=["questions", "no answers", "answers"])
def test_answers_before_a_run_is_stopped_count(answers: int) -> None:
    server = Mute(answers)
    course = asyncio.run(Run(QUICK, server, lambda tokens: [0] * tokens)(0.2))
    assert course.failures == ["broken off after 0.2 s"] and server.open == 0
    assert len(course.turns) == answers and len(course.lives) == 4
    found = figures(QUICK, course)
    assert (found.answers, found.answers_per_minute > 0) == (max(answers - 4, 0), answers > 4)


# --- figures ----------------------------------------------------------------------------------------------------------


def test_figures_of_a_crowd_leave_its_questions_out() -> None:
    work = msgspec.structs.replace(CLOSED, agents=1, loops=2, answer=3)
    turns = [
        Turn(0, 0, 1.0, Answer([5.0], 100)),
        Turn(0, 1, 20.0, Answer([20.1, 20.2, 20.4], 9)),
        Turn(0, 2, 40.0, Answer([40.3, 40.4, 40.5], 117)),
    ]
    found = figures(work, Course(10.0, 70.0, turns, ["agent 7"], [(1.0, 71.0)]))
    assert (found.answers, found.wanted, found.failures) == (2, 2, ["agent 7"])
    assert (found.question.worst, found.wake_up.count) == (4.0, 2)
    assert found.wake_up.p50 == pytest.approx(0.2) and found.wake_up.worst == pytest.approx(0.3)
    assert found.between_tokens.count == 4 and found.between_tokens.worst == pytest.approx(0.2)
    assert found.answer.worst == pytest.approx(0.5)
    assert (found.answers_per_minute, found.tokens_per_s) == (2.0, 0.1)
    assert (found.alive_most, found.alive_mean, found.computed_anew) == (1, 1.0, 1)


def test_the_slowest_wake_ups_are_listed_in_order_of_time() -> None:
    woken = [Late(float(at), at % 7, (at * 37 % 100) / 100) for at in range(100)]
    told = latest(woken)
    assert [one.at for one in told] == sorted(one.at for one in told)
    assert sorted(one.took for one in told) == [(100 - WORST + n) / 100 for n in range(WORST)]
    assert latest(woken[:3]) == woken[:3]


def test_both_answers_of_an_arriving_agent_count() -> None:
    work = msgspec.structs.replace(OPEN, agents=1, answer=2)
    turns = [Turn(0, 0, 1.0, Answer([2.0, 2.5], 100)), Turn(0, 1, 5.0, Answer([6.0, 7.0], None))]
    found = figures(work, Course(0.0, 10.0, turns))
    assert (found.answers, found.wanted, found.between_tokens.count, found.wake_up.count) == (2, 2, 2, 1)
    assert found.computed_anew is None  # the server does not tell it


def test_an_answer_with_only_the_observation_and_one_token_computed_had_all_its_kv() -> None:
    assert anew(CLOSED, [9, 9, 10, 120]) == 2
    assert anew(CLOSED, []) == 0


def test_agents_alive_at_once_are_counted_at_most_and_on_average() -> None:
    assert alive([(0.0, 4.0), (1.0, 2.0), (2.0, 3.0)]) == (2, 1.5)  # one ends as another begins
    assert alive([]) == (0, 0.0)


# --- what is said of them ---------------------------------------------------------------------------------------------


def tried(work: Work, step: float = 0.01, answers: int = 12) -> Tried:
    def course(agents: int, seconds: float) -> Course:
        turns = [Turn(0, 1, 0.0, Answer([0.5, 0.5 + step], 9)) for _ in range(answers)]
        return Course(0.0, seconds, turns, lives=[(0.0, seconds)] * agents)

    half = msgspec.structs.replace(work, agents=2)
    found = Tried(work=work, alone=figures(work, course(1, 60.0)), ways={"none": figures(work, course(4, 120.0))})
    found.usage["none"] = [{"seconds": 0.0, "arrived": 0.0}, {"seconds": 2.0, "arrived": 4e9}]
    found.reference = figures(half, course(2, 120.0))
    return found


def results(**peer: str) -> Results:
    return Results(
        device="a device",
        budget_bytes=1,
        ceilings={"up": 50e9, "down": 50e9, "both": None},
        page_size=16,
        page_bytes=1000,
        pages={"device": 10, "host": 20, "disk": 0},
        dtype="float32",
        tried=[tried(CLOSED), tried(msgspec.structs.replace(CLOSED, agents=9))],
        findings=[],
        peer=Batched(status=Status.FAILED, note="exit code 1: why") if peer else None,
    )


def test_the_share_compares_answers_for_each_agent() -> None:
    found = tried(CLOSED)
    assert found.share(found.ways["none"]) == pytest.approx(0.5)  # twice as many agents gave as many answers
    found.reference = None
    assert found.share(found.ways["none"]) is None
    assert list(found.runs) == ["none"]


def test_the_table_and_the_summary_have_the_same_figures() -> None:
    found = results(peer="failed")
    assert found.demand_bytes(CLOSED) == 4 * 9 * 1000
    told = summary(found)
    assert "none: 12 of 12 answers, wake-up p99 500.0 ms" in told and "(0.50 of room)" in told
    assert told.endswith(f"; {PEER}: failed, exit code 1: why") and "|" not in told and "\n" not in told
    first, _ = tables("m", found)
    assert [next(iter(column.cells)) for column in first.columns][-3:] == ["0.50", "4", "0"]
    assert list(first.columns[0].cells) == ["none", f"{REFERENCE}: 2 agents"]


def test_results_are_equal_after_a_round_trip_through_json() -> None:
    found = results(peer="failed")
    assert msgspec.convert(msgspec.json.decode(msgspec.json.encode(found)), Results) == found


def test_a_figure_orders_crowds_by_their_number_of_agents() -> None:
    found = results()
    found.tried.reverse()
    found.tried.append(tried(OPEN))
    curves = by_agents(found, "wake_up")
    assert [agents for agents, _ in curves["none"]] == [4, 9]
    assert curves[REFERENCE][0][1].p50 == 0.5


def test_a_rate_is_the_growth_since_the_point_before() -> None:
    points = [{"seconds": 0.0, "left": 0.0}, {"seconds": 0.5, "left": 1e9}, {"seconds": 2.5, "left": 1e9}]
    assert rates(points, "left") == ([0.5, 2.5], [2.0, 0.0])


def test_pages_up_to_the_number_that_left_count_as_returned_and_others_as_new() -> None:
    traffic = Traffic()
    for held in ({"a": 5, "b": 2}, {"a": 0, "b": 3}, {"a": 6, "b": 3}, {"b": 1}, {"b": 2}):
        traffic.look(held)
    assert (traffic.left, traffic.arrived) == (
        5 + 2,
        5 + 1,
    )  # the sixth page is new; pages of a closed session have not left


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_time_scale_stretches_tool_times_and_arrivals() -> None:
    each = {"tool_s": (10.0, 20.0), "observation": 64, "answer": 50, "loops": 4, "seed": 7}
    crowd, arrivals = works_of(["80x2048"], 5, 300, 0.2, 0.1, each)
    assert (crowd.agents, crowd.context, crowd.tool_s, crowd.rate) == (80, 2048, (1.0, 2.0), 0.0)
    assert (arrivals.agents, arrivals.context, arrivals.loops, arrivals.rate) == (5, 300, 1, 2.0)
    assert works_of([], 0, 300, 0.2, 1.0, each) == []


def test_malformed_crowds_and_unknown_ways_are_refused() -> None:
    assert crowd_of("80x2048") == (80, 2048) and ways_of("none,tool") == [Way.NONE, Way.TOOL]
    for text in ("80", "0x4", "80x", "-1x5"):
        with pytest.raises(click.BadParameter):
            crowd_of(text)
    with pytest.raises(click.BadParameter, match="expected"):
        ways_of("none,all")


def test_work_beyond_the_models_context_is_refused_with_the_figures() -> None:
    with pytest.raises(click.ClickException, match="comes to 140 tokens, the model takes 128"):
        expect_room(CLOSED, ModelInfo(name="m", path="", max_context=128))
    with pytest.raises(click.ClickException, match="connection"):
        expect_room(msgspec.structs.replace(CLOSED, agents=1 << 30), ModelInfo(name="m", path="", max_context=4096))


def test_the_lone_agent_and_the_warm_up_have_the_works_lengths_and_no_arrivals() -> None:
    for work in (alone(OPEN), warm_up(OPEN)):
        assert (work.context, work.observation, work.answer, work.rate) == (100, 8, 5, 0.0)
        assert work.tool_s[1] <= 0.2 and work.agents <= 16


def test_a_checkpoint_without_text_has_its_weights_and_no_tokenizer(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    for name in ("config.json", "model-1.safetensors", "model.safetensors.index.json", "tokenizer.json", "README.md"):
        (whole / name).write_text(name)
    links = tmp_path / "links"
    links.mkdir()
    bare = without_text(whole, links)
    assert bare.name == "whole"
    assert {file.name: file.read_text() for file in bare.iterdir()} == {
        name: name for name in ("config.json", "model-1.safetensors", "model.safetensors.index.json")
    }
