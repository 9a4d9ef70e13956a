from __future__ import annotations

import asyncio
import os
import signal
from itertools import pairwise
from types import SimpleNamespace

import pytest

import djinn_client as djinn
from djinn_client import DjinnError, EngineLost, OutOfMemory
from djinn_client.protocol import Cancel, Done, Ping, SetBudget
from djinnd.server.engines.engine_process import EngineProcess
from djinnd.server.engines.supervisor import BackOff
from tests.support.scripted_engine.script import Script
from tests.support.served import Wire, wait_for


def test_the_first_restart_is_at_once_and_delays_double_up_to_minutes():
    back_off, at, delays = BackOff(), 0.0, []
    for _ in range(14):
        delays.append(back_off.died(at))
        at += delays[-1] + 5.0  # it lives for five seconds
    assert delays[:4] == [0.0, 0.25, 0.5, 1.0]
    assert all(later == min(2 * sooner, 120.0) for sooner, later in pairwise(delays[1:]))
    assert delays[-1] == 120.0, "the delay must not grow further"


def test_deaths_over_one_user_s_models_never_make_others_wait_long():
    back_off, at = BackOff(), 0.0
    for _ in range(14):
        delay = back_off.died(at, over_a_user=True)
        assert delay <= 2.0
        at += delay
    assert back_off.died(at) == 4.0, "a death without blame doubles the delay from there"


@pytest.mark.parametrize(("life", "delay"), [(59.0, 1.0), (61.0, 0.0)])
def test_an_engine_with_a_long_life_resets_the_delays(life, delay):
    back_off, at = BackOff(), 1000.0
    for _ in range(3):
        at += back_off.died(at)
    assert back_off.died(at + life) == delay


def test_an_engine_that_fails_to_start_is_started_again(serve):
    daemon = serve(Script(on_start={"1": "die", "2": "die"}))
    with daemon.client() as client:
        client.load("djinn-tiny")
        assert client.status().devices[0].restarts == 2
        assert daemon.starts == 3


def test_a_new_budget_moves_blocks_and_applies_to_the_next_engine(serve):
    daemon = serve(memory="1MiB")
    with daemon.client() as client:
        client.load("djinn-tiny")
        changed = client.set_budget(48 << 10)
        assert (changed.budget_bytes, changed.used_bytes, changed.seconds) == (48 << 10, 48 << 10, 0.25)
        (model,) = changed.models
        assert (model.name, model.state, model.blocks_plain, model.blocks_streamed) == ("djinn-tiny", "ready", 3, 5)
        assert client.load("djinn-tiny").blocks_plain == 3
        assert client.status().devices[0].budget_bytes == 48 << 10
        os.kill(client.status().devices[0].pid, signal.SIGKILL)
        wait_for(lambda: client.status().devices[0].restarts == 1)
        client.load("djinn-tiny")
        assert client.status().devices[0].budget_bytes == 48 << 10
        assert client.status(check=True).integrity == []


def test_a_refused_budget_changes_nothing(serve):
    daemon = serve(memory="1MiB")
    with daemon.client() as client:
        client.load("djinn-tiny")
        with pytest.raises(OutOfMemory, match="could go down to 24576 bytes") as caught:
            client.set_budget(1)
        assert caught.value.data == {"needed": 24576}
        assert client.status().devices[0].budget_bytes == 1 << 20
        assert client.models()[0].blocks_plain == 8


def test_a_budget_is_remembered_if_the_caller_is_cancelled(serve):
    daemon = serve(memory="1MiB")
    with daemon.client() as client, Wire(daemon.address) as wire:
        client.load("djinn-tiny")
        engine = client.status().devices[0].pid
        os.kill(engine, signal.SIGSTOP)
        wire.send(SetBudget(id=1, memory_bytes=48 << 10))
        assert wire.ask(Ping(id=2)) == Done(id=2)
        wire.send(Cancel(target=1))
        assert wire.reply().code == "cancelled"
        os.kill(engine, signal.SIGCONT)
        wait_for(lambda: "budget_set" in daemon.log)
        os.kill(engine, signal.SIGKILL)
        wait_for(lambda: client.status().devices[0].restarts == 1)
        client.load("djinn-tiny")
        assert client.status().devices[0].budget_bytes == 48 << 10


def test_an_engine_that_dies_over_a_new_budget(serve):
    """The caller gets an error; the next engine has the old budget."""
    daemon = serve(memory="1MiB")
    with daemon.client() as client, Wire(daemon.address) as wire:
        client.load("djinn-tiny")
        engine = client.status().devices[0].pid
        os.kill(engine, signal.SIGSTOP)
        wire.send(SetBudget(id=1, memory_bytes=48 << 10))
        assert wire.ask(Ping(id=2)) == Done(id=2)
        os.kill(engine, signal.SIGKILL)
        assert wire.reply().code == "engine_lost"
        client.load("djinn-tiny")
        assert client.status().devices[0].budget_bytes == 1 << 20


def test_an_engine_that_hangs_at_its_start_is_killed(serve):
    daemon = serve(Script(on_start={"1": "hang"}), limits={"engine_start": "3s"})
    with daemon.client() as client:
        client.load("djinn-tiny")
        assert daemon.starts == 2
    assert "no sign of life" in daemon.log


def test_the_wait_for_an_engine_is_limited(serve):
    daemon = serve(Script(on_start={"1": "hang"}), limits={"engine_wait": "50ms"})
    with daemon.client() as client:
        with pytest.raises(DjinnError, match=r"more than 0\.05 s: try again later") as caught:
            client.load("djinn-tiny")
        assert caught.value.code == "engine_lost"
        wait_for(lambda: daemon.starts == 1)
        daemon.kill_starting_engine()
        wait_for(lambda: client.status().state == "ready")
        client.load("djinn-tiny")


@pytest.mark.long
def test_engines_that_crash_repeatedly_are_restarted(serve):
    """Five deaths in a row. The sixth engine serves the waiting calls, and the daemon has not ended."""
    daemon = serve(Script(on_start={str(start): "die" for start in range(2, 6)}))
    with daemon.client() as client, djinn.Session("djinn-tiny", address=daemon.address) as session:
        os.kill(client.status().devices[0].pid, signal.SIGKILL)
        wait_for(lambda: daemon.starts > 1)
        assert session.generate([5], max_tokens=2).token_ids == [2, 3]
        status = client.status(check=True)
        assert (status.integrity, status.devices[0].restarts, daemon.starts) == ([], 5, 6)


def test_the_error_says_when_the_next_engine_is_started(serve):
    daemon = serve(Script(on_start={str(start): "die" for start in range(2, 12)}), limits={"engine_wait": "500ms"})
    with daemon.client() as client:
        wait_for(lambda: client.status().state == "ready")
        client.load("djinn-tiny")
        os.kill(client.status().devices[0].pid, signal.SIGKILL)
        wait_for(lambda: daemon.starts >= 5 and client.status().state == "lost")
        with pytest.raises(EngineLost, match="the next one is started in") as caught:
            client.load("djinn-tiny")
        assert 0.0 <= caught.value.data["retry_s"] <= 8.0


def test_a_device_refused_by_a_later_engine_is_tried_again(serve):
    daemon = serve(Script(on_start={"2": "refuse"}))
    with daemon.client() as client:
        client.load("djinn-tiny")
        os.kill(client.status().devices[0].pid, signal.SIGKILL)
        wait_for(lambda: daemon.starts == 3)
        client.load("djinn-tiny")
        assert client.status().state == "ready"


def test_a_cancelled_wait_for_an_engine_s_end_leaves_other_waits():
    async def main():
        ended = asyncio.get_running_loop().create_future()
        process = EngineProcess(
            SimpleNamespace(pid=os.getpid(), wait=lambda: _result(ended)), SimpleNamespace(close=int)
        )
        first = asyncio.create_task(process.gone())
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait([first])
        ended.set_result(0)
        await process.gone()

    asyncio.run(main())


async def _result(future):
    return await future
