from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec

import djinn_client as djinn
from djinn_client.protocol import (
    BudgetReply,
    CloseSession,
    Done,
    ExplainSession,
    GetQuotas,
    GetStatus,
    GetTrace,
    ListModels,
    ListPrefixes,
    ListSessions,
    LoadModel,
    ModelInfo,
    ModelReply,
    Models,
    PauseReply,
    PauseSession,
    Ping,
    PlanModel,
    PlanReply,
    Prefixes,
    PrefixInfo,
    PrefixPublished,
    PrefixWithdrawn,
    Progress,
    PublishPrefix,
    Quotas,
    ResumeSession,
    Sessions,
    SetBudget,
    SetPriority,
    Span,
    StatusReply,
    TraceReply,
    UnloadModel,
    WhyReply,
    WithdrawPrefix,
)
from djinn_client.protocol.fields.placing import ModelPlan, Placing
from tests.support.scripted_daemon import Line, ScriptedDaemon, session_info

MODEL = ModelInfo(name="djinn-tiny", path="/models/djinn-tiny", state="ready")
PLAN = msgspec.convert(
    {field.name: 1 for field in msgspec.structs.fields(ModelPlan) if field.required}
    | {"model": "djinn-tiny", "family": "llama", "dtype": "float32", "step_s": {1: 0.5}},
    ModelPlan,
)


PREFIX = PrefixInfo(id="p-1", model="djinn-tiny", tokens=512, user=0, created=1.5)


WHY = djinn.Why(state="queued", reason="two go first", figures={"ahead": 2}, ahead=["s-0"], others_ahead=1)


def status(id: int, findings: list[str]) -> StatusReply:
    return StatusReply(
        id=id,
        version="0.1.0",
        pid=1,
        uptime_s=1.0,
        address="/s",
        state="ready",
        devices=[],
        models=[MODEL],
        sessions={"interactive": 1},
        requests_running=0,
        requests_queued=0,
        connections=1,
        arena_bytes=0,
        integrity=findings,
    )


QUOTA = djinn.QuotaUse(
    user=1000,
    rule="guests",
    weight=2.0,
    highest_class="agent",
    sessions=1,
    sessions_limit=None,
    device_kv=1,
    device_kv_limit=2,
    host_kv=3,
    host_kv_limit=None,
    disk_kv=4,
    disk_kv_limit=5,
    tokens_per_s=0.5,
    tokens_per_s_limit=None,
)


def answer(line: Line) -> None:
    """One connection's calls, answered as they come."""
    line.welcome()
    while (request := line.receive()) is not None:
        match request:
            case Ping(id=id) | CloseSession(id=id, session="s-1") | UnloadModel(id=id, model="djinn-tiny", force=True):
                line.send(Done(id=id))
            case PauseSession(id=id, session="s-1", tier=tier):
                line.send(PauseReply(id=id, tier=tier, pages=1, nbytes=2, seconds=0.5))
            case ResumeSession(id=id, session="s-1"):
                line.send(Done(id=id))
            case SetPriority(id=id, session="s-1", priority="batch"):
                line.send(Done(id=id))
            case ExplainSession(id=id, session="s-1"):
                line.send(WhyReply(id=id, why=WHY))
            case PublishPrefix(id=id, session="s-1", tokens=tokens):
                line.send(PrefixPublished(id=id, prefix=msgspec.structs.replace(PREFIX, tokens=tokens or 512)))
            case ListPrefixes(id=id):
                line.send(Prefixes(id=id, prefixes=[PREFIX]))
            case WithdrawPrefix(id=id, prefix=prefix):
                line.send(PrefixWithdrawn(id=id, in_force=prefix == "p-1"))
            case GetStatus(id=id, check=check):
                line.send(status(id, ["page 3 has 2 owners"] if check else []))
            case ListModels(id=id):
                line.send(Models(id=id, models=[MODEL]))
            case GetQuotas(id=id, all=of_all):
                line.send(Quotas(id=id, quotas=[QUOTA] * (2 if of_all else 1)))
            case ListSessions(id=id):
                line.send(Sessions(id=id, sessions=[session_info()]))
            case PlanModel(id=id, memory_bytes=memory_bytes, placing=placing):
                slots = 0 if placing is None else placing.slots
                plan = msgspec.structs.replace(PLAN, budget_bytes=memory_bytes, slots=slots)
                line.send(PlanReply(id=id, plan=plan))
            case SetBudget(id=id, memory_bytes=memory_bytes):
                line.send(BudgetReply(id=id, budget_bytes=memory_bytes, used_bytes=1, seconds=0.5, models=[MODEL]))
            case GetTrace(id=id, steps=steps, seconds=seconds):
                line.send(TraceReply(id=id, device="cpu", spans=[Span("step", "step", 0.0, seconds, {"rows": steps})]))
            case LoadModel(id=id, placing=Placing(resident=resident)):
                line.send(ModelReply(id=id, model=msgspec.structs.replace(MODEL, blocks_plain=resident)))
            case LoadModel(id=id, model=model, kv_bytes=kv_bytes):
                line.send(Progress(id=id, model=model, stage="reading", done=1, total=kv_bytes))
                line.send(ModelReply(id=id, model=MODEL))
            case _:
                raise AssertionError(request)


def test_each_call_of_the_module(daemon: ScriptedDaemon) -> None:
    address = daemon.play(answer)
    told: list[Progress] = []
    assert djinn.status(address=address).integrity == []
    assert djinn.status(check=True, address=address).integrity == ["page 3 has 2 owners"]
    assert djinn.models(address=address) == [MODEL]
    assert djinn.sessions(address=address) == [session_info()]
    assert djinn.quotas(address=address) == [QUOTA]
    assert djinn.quotas(all=True, address=address) == [QUOTA, QUOTA]
    assert djinn.load("djinn-tiny", kv_bytes=9, on_progress=told.append, address=address) == MODEL
    assert [progress.total for progress in told] == [9]
    assert djinn.load("djinn-tiny", resident=29, address=address).blocks_plain == 29
    planned = djinn.plan("djinn-tiny", memory_bytes=7, slots=4, address=address)
    assert (planned.budget_bytes, planned.slots, planned.step_s) == (7, 4, {1: 0.5})
    assert djinn.plan("djinn-tiny", address=address).slots == 0
    assert djinn.set_budget(9, address=address).budget_bytes == 9
    assert djinn.trace(steps=3, seconds=0.5, address=address).spans == [Span("step", "step", 0.0, 0.5, {"rows": 3})]
    assert djinn.pause("s-1", address=address).tier == "host"
    assert djinn.pause("s-1", "disk", address=address).tier == "disk"
    djinn.unpause("s-1", address=address)
    djinn.set_priority("s-1", "batch", address=address)
    assert djinn.why("s-1", address=address) == WHY
    djinn.unload("djinn-tiny", force=True, address=address)
    djinn.close("s-1", address=address)


def test_public_prefixes(daemon: ScriptedDaemon) -> None:
    with djinn.Client(daemon.play(answer)) as client:
        assert client.publish_prefix("s-1") == PREFIX
        assert client.publish_prefix("s-1", 256).tokens == 256
        assert client.prefixes() == [PREFIX]
        assert (client.withdraw_prefix("p-1"), client.withdraw_prefix("p-2")) == (True, False)


def test_a_client_keeps_its_connection(daemon: ScriptedDaemon) -> None:
    def only(line: Line) -> None:
        answer(line)
        daemon.play_next(Line.close)

    with djinn.Client(daemon.play(only)) as client:
        client.ping()
        client.ping()
        assert client.welcome().user == 1000


def test_a_client_makes_a_lost_connection_anew(daemon: ScriptedDaemon) -> None:
    def short(line: Line) -> None:
        line.welcome()
        request = line.expect(Ping)
        line.send(Done(id=request.id))

    with djinn.Client(daemon.play(short, answer)) as client:
        client.ping()
        try:
            client.ping()  # meets the hang-up
        except djinn.ConnectionLost:
            client.ping()


def test_threads_share_a_client(daemon: ScriptedDaemon) -> None:
    together = threading.Barrier(2, timeout=30)

    def script(line: Line) -> None:
        line.welcome()
        while (request := line.receive()) is not None:
            together.wait()  # both calls have come
            line.send(Done(id=request.id))

    with djinn.Client(daemon.play(script)) as client, ThreadPoolExecutor(2) as threads:
        for _ in range(2):
            for call in [threads.submit(client.ping) for _ in range(2)]:
                call.result(30)
