"""An engine or the daemon dies while a model is asleep or is falling asleep. Its sessions continue unharmed."""

from __future__ import annotations

import os
import signal
import time

import pytest

import djinn_client as djinn
from djinnctl.restart import restart
from tests.conftest import MODEL, DaemonStarter
from tests.support import reference
from tests.support.daemon import wait_for
from tests.support.lives import Lives
from tests.support.loaded import random_prompt
from tests.support.models import tiny_model

PROMPT = random_prompt(300, 500, 3)  # two pages
NEW = 4  # tokens per call
SOON = 0.25  # seconds of keep_alive


class Sleeper:
    """A session of a model that has gone to sleep, with its tokens so far."""

    def __init__(self, lives: Lives) -> None:
        self.lives = lives
        lives.wait_for_tiers(disk=False)
        with djinn.Session(MODEL, address=lives.address) as s:
            self.told = s.generate(PROMPT, max_tokens=NEW, ignore_eos=True).token_ids
            s.detach()
        self.id = s.id
        with lives.now.client() as client:
            client.load(MODEL, keep_alive_s=SOON)

    def state(self) -> str:
        with self.lives.now.client() as client:
            return next(model.state for model in client.models() if model.name == MODEL)

    def wait_until_asleep(self) -> None:
        wait_for(lambda: self.lives.log.count("model_asleep") == self.lives.log.count("model_ready"))
        assert self.state() == "asleep"

    def goes_on(self) -> int:
        """Generates a few tokens and checks all of them. Returns the number of tokens that were computed for it."""
        with djinn.Session.attach(self.id, address=self.lives.address) as s:
            answer = s.generate(max_tokens=NEW, ignore_eos=True)
            s.detach()
        self.told += answer.token_ids
        assert self.told == reference.greedy(tiny_model(), PROMPT, len(self.told))
        with self.lives.now.client() as client:
            assert client.status(check=True).integrity == []
        return answer.usage.computed_tokens


@pytest.fixture
def lives(start_daemon: DaemonStarter) -> Lives:
    return Lives(start_daemon, {"host_kv": "32MiB", "disk_kv": 0})


def test_its_engine_is_killed_while_it_falls_asleep(lives: Lives) -> None:
    """Killed before the engine has received the message, and at any time after that."""
    sleeper = Sleeper(lives)
    sleeper.wait_until_asleep()
    for delay in (None, 0.0, 0.005):
        engine, falls = lives.engine(), lives.log.count("model_falls_asleep")
        sleeper.goes_on()
        os.kill(engine, signal.SIGSTOP)
        wait_for(lambda falls=falls: lives.log.count("model_falls_asleep") > falls)
        if delay is not None:
            os.kill(engine, signal.SIGCONT)
            time.sleep(delay)
        os.kill(engine, signal.SIGKILL)
        wait_for(lambda engine=engine: (device := lives.now.device()).state == "ready" and device.pid != engine)
        assert sleeper.state() == "asleep"
    sleeper.goes_on()


def test_a_warm_restart_while_a_model_is_asleep(lives: Lives) -> None:
    sleeper = Sleeper(lives)
    sleeper.wait_until_asleep()
    with lives.now.client() as client:
        assert restart(client, warm=True).models == []
    assert sleeper.state() == "asleep"
    assert (sleeper.goes_on(), lives.log.count("checkpoint_read")) == (1, 1)


@pytest.mark.smoke
def test_the_daemon_is_killed_while_a_model_is_asleep(lives: Lives) -> None:
    sleeper = Sleeper(lives)
    sleeper.wait_until_asleep()
    lives.kill()
    lives.again()
    assert sleeper.state() == "asleep"
    assert (sleeper.goes_on(), lives.log.count("checkpoint_read")) == (1, 0)
