from __future__ import annotations

import djinn_client as djinn
from djinn_client.protocol import (
    CloseSession,
    Done,
    GetStatus,
    ListModels,
    ListSessions,
    LoadModel,
    ModelInfo,
    ModelReply,
    Models,
    Ping,
    Progress,
    Sessions,
    StatusReply,
    UnloadModel,
)
from tests.support.scripted_daemon import Line, ScriptedDaemon, session_info

MODEL = ModelInfo(name="djinn-tiny", path="/models/djinn-tiny", state="ready")


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


def answer(line: Line) -> None:
    """One connection's calls, answered as they come."""
    line.welcome()
    while (request := line.receive()) is not None:
        match request:
            case Ping(id=id) | CloseSession(id=id, session="s-1") | UnloadModel(id=id, model="djinn-tiny", force=True):
                line.send(Done(id=id))
            case GetStatus(id=id, check=check):
                line.send(status(id, ["page 3 has 2 owners"] if check else []))
            case ListModels(id=id):
                line.send(Models(id=id, models=[MODEL]))
            case ListSessions(id=id):
                line.send(Sessions(id=id, sessions=[session_info()]))
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
    assert djinn.load("djinn-tiny", kv_bytes=9, on_progress=told.append, address=address) == MODEL
    assert [progress.total for progress in told] == [9]
    djinn.unload("djinn-tiny", force=True, address=address)
    djinn.close("s-1", address=address)


def test_a_client_keeps_its_connection(daemon: ScriptedDaemon) -> None:
    def only(line: Line) -> None:
        answer(line)
        daemon._scripts[:] = [lambda line: line.close()]

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
