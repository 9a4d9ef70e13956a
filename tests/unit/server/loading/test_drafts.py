"""A model's draft is loaded before it, and does not leave before it: over real sockets, with a scripted engine."""

from __future__ import annotations

import os
import signal
import time

import pytest

from djinn_client.errors import InvalidRequest
from tests.support.scripted_engine.script import Script
from tests.support.served import wait_for
from tests.support.serving import TINY

SOON = 0.15  # seconds of keep_alive
MODELS = {
    "small": {"path": str(TINY), "keep_alive": f"{SOON}s"},
    "big": {"path": str(TINY), "speculation": {"draft": "small"}},
}


def state(client, name):
    return next(model for model in client.models() if model.name == name).state


def test_a_draft_is_loaded_first_and_stays_until_its_target_has_left(serve):
    daemon = serve(models=MODELS)
    with daemon.client() as client:
        client.load("big")
        assert daemon.log.index("model_ready model=small") < daemon.log.index("model_ready model=big")
        time.sleep(3 * SOON)
        assert state(client, "small") == "ready", "its keep_alive has passed, and big needs it"
        with pytest.raises(InvalidRequest, match="small guesses for big: unload big first"):
            client.unload("small", force=True)
        client.unload("big")
        wait_for(lambda: state(client, "small") == "asleep")
        client.load("big")
        assert state(client, "small") == "ready"


def test_both_come_back_on_the_next_engine(serve):
    daemon = serve(models=MODELS)
    with daemon.client() as client:
        client.load("big")
        os.kill(client.status().devices[0].pid, signal.SIGKILL)
        wait_for(lambda: daemon.log.count("model_ready model=big") == 2)
        assert [state(client, name) for name in MODELS] == ["ready", "ready"]


@pytest.mark.parametrize("victim", ["small", "big"])
def test_engines_that_die_during_their_loads_leave_no_load_that_waits_for_another(serve, folder, victim):
    script = Script(on_load={victim: "die"})
    daemon = serve(script, models=MODELS)
    with daemon.client() as client, pytest.raises(Exception, match=f"while {victim} was being loaded"):
        client.load("big")
