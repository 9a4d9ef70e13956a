"""Sessions with edits, from a position on and at positions: forked, cut, moved, restarted, saved. Their tokens equal
those of hooks in transformers for the same edits."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

import djinn_client as djinn
from djinn_client.protocol import Tier
from tests.support import ops, reference
from tests.support.daemon import Daemon
from tests.support.edited import BLOCKS, NEW, VOCABULARY, WIDTH, assert_close, go_on, prompt_of, vector
from tests.support.parameters import long_except
from tests.support.torch_hooks import Change, Hooked

V = vector(21)
WHERE = "blocks.2.hook_resid_post"


def test_an_edit_without_positions_applies_until_it_is_removed(llama: Path, roomy_daemon: Daemon) -> None:
    model, prompt = Hooked(llama), prompt_of(270, 5)
    with djinn.Session(str(llama), address=roomy_daemon.address) as s:
        tokens = prompt + go_on(s, prompt)
        assert tokens == prompt + model.greedy(prompt, NEW)
        began = len(tokens) - 1  # where the next token is chosen

        edit = s.steer("blocks.2", V, scale=3)
        (told,) = s.edits()
        assert (told.id, told.spans, told.op, told.scale) == (edit.id, [(began, None)], "add", 3.0)
        during = Change(WHERE, ops.add(V, 3), start=began)
        added = model.greedy(tokens, NEW, [during])
        assert go_on(s) == added
        tokens += added
        ended = len(tokens) - 1

        edit.remove()
        edit.remove()
        assert [told.spans for told in s.edits()] == [[(began, ended)]]
        until = Change(WHERE, ops.add(V, 3), start=began, end=ended)
        assert go_on(s) == model.greedy(tokens, NEW, [until])
        assert s.token_ids()[: len(tokens)] == tokens


def test_computed_positions_are_computed_again(llama: Path, roomy_daemon: Daemon) -> None:
    model, prompt, rows = Hooked(llama), prompt_of(300, 6), vector(22, 2, WIDTH)
    with djinn.Session(str(llama), address=roomy_daemon.address) as s:
        tokens = prompt + go_on(s, prompt)
        s.patch(rows, "blocks.1.hook_attn_out", positions=[260, 290])
        answer = s.generate(max_tokens=NEW, ignore_eos=True)
        change = Change("blocks.1.hook_attn_out", ops.replace(rows), positions=[260, 290])
        assert answer.token_ids == model.greedy(tokens, NEW, [change])
        assert answer.usage.computed_tokens == len(tokens) - 260


def test_patching_from_one_session_into_another(llama: Path, roomy_daemon: Daemon) -> None:
    """Captured in one session, patched into a fork of another."""
    model, clean, corrupted = Hooked(llama), prompt_of(40, 7), prompt_of(40, 8)
    with djinn.Session(str(llama), address=roomy_daemon.address) as s:
        cache = s.capture("blocks.*").run(clean)
    with djinn.Session(str(llama), address=roomy_daemon.address) as s:
        assert go_on(s, corrupted) == model.greedy(corrupted, NEW)
        s.truncate(40)
        for block in range(BLOCKS):
            name = f"blocks.{block}.hook_resid_post"
            for positions in ([5], [39], range(10, 30)):
                with s.fork() as t:
                    t.patch(cache[name], positions=positions)
                    rows = torch.stack([cache[name][0, position] for position in positions])
                    change = Change(name, ops.replace(rows), positions=list(positions))
                    found = t.capture("logits").run()
                    assert found.positions == range(positions[0], 40)
                    assert_close(found["logits"][0], model.run(corrupted, [change])[0][positions[0] :], name)
        assert s.edits() == []
        assert go_on(s) == model.greedy(corrupted, NEW)  # the forks have not changed it


def test_a_fork_has_the_edits_and_is_independent(llama: Path, roomy_daemon: Daemon) -> None:
    model, prompt = Hooked(llama), prompt_of(40, 9)
    with djinn.Session(str(llama), address=roomy_daemon.address) as s:
        s.steer("blocks.2", V, scale=3)
        first = go_on(s, prompt)
        change = Change(WHERE, ops.add(V, 3))
        assert first == model.greedy(prompt, NEW, [change])
        with s.fork() as t:
            assert t.edits() == s.edits() and t.info.edits == 1
            t.unsteer()
            tokens, over = prompt + first, Change(WHERE, ops.add(V, 3), end=len(prompt + first) - 1)
            assert go_on(t) == model.greedy(tokens, NEW, [over])
        assert go_on(s) == model.greedy(tokens, NEW, [change])


def test_truncating(llama: Path, roomy_daemon: Daemon) -> None:
    """An edit without an end applies from the session's new end on. Positions stay the same."""
    model, prompt = Hooked(llama), prompt_of(40, 10)
    with djinn.Session(str(llama), address=roomy_daemon.address) as s:
        go_on(s, prompt)
        s.steer("blocks.2", V, scale=3)
        s.steer("blocks.0", V, positions=[10, 45])
        go_on(s)
        s.truncate(30)
        changes = [
            Change(WHERE, ops.add(V, 3), start=30),
            Change("blocks.0", ops.add(V), positions=[10, 45]),
        ]
        again = prompt_of(8, 12)
        assert go_on(s, again) == model.greedy(prompt[:30] + again, NEW, changes)
        s.truncate(5)
        s.unsteer()
        changes = [Change("blocks.0", ops.add(V), positions=[])]
        assert go_on(s, again) == model.greedy(prompt[:5] + again, NEW, changes)


def test_sessions_with_equal_edits_share_their_pages(llama: Path, roomy_daemon: Daemon) -> None:
    prompt = prompt_of(520, 13)

    def computed(*edits: tuple[str, float, list[int] | None]) -> int:
        with djinn.Session(str(llama), address=roomy_daemon.address) as s:
            for point, scale, positions in edits:
                s.steer(point, V, scale=scale, positions=positions)
            return s.generate(prompt, max_tokens=1, ignore_eos=True).usage.computed_tokens

    assert computed() == 520
    assert computed() == 520 - 512
    assert computed(("blocks.2", 3.0, None)) == 520
    assert computed(("model.layers.2", 3.0, None)) == 520 - 512
    assert computed(("blocks.2", 2.0, None)) == 520
    assert computed(("blocks.2", 3.0, [300])) == 520 - 256  # no earlier position is edited
    assert computed() == 520 - 512


@pytest.mark.long
def test_steering_during_a_conversation_beside_other_streams(llama: Path, roomy_daemon: Daemon) -> None:
    """One session is edited, patched and captured between its calls. Other sessions get the tokens that they get
    alone."""
    model, prompt = Hooked(llama), prompt_of(30, 14)

    async def other(number: int) -> list[int]:
        async with djinn.AsyncSession(str(llama), address=roomy_daemon.address) as s:
            return [
                token
                async for piece in s.stream(prompt_of(20 + number, 50 + number), max_tokens=80, ignore_eos=True)
                for token in piece.token_ids
            ]

    async def one() -> None:
        async with djinn.AsyncSession(str(llama), address=roomy_daemon.address) as s:
            tokens, changes = list(prompt), []
            given: list[int] | None = prompt
            for number in range(6):
                edit = await s.steer(f"blocks.{number % BLOCKS}", V, scale=number)
                start = len(tokens) - 1 if number else 0
                told = (await s.generate(given, max_tokens=4, ignore_eos=True)).token_ids
                given = None
                point = f"blocks.{number % BLOCKS}.hook_resid_post"
                changes.append(Change(point, ops.add(V, number), start=start))
                assert told == model.greedy(tokens, 4, changes)
                tokens += told
                if number % 2:
                    await edit.remove()
                    changes[-1] = Change(point, ops.add(V, number), start=start, end=len(tokens) - 1)

    async def together() -> list[list[int]]:
        others = asyncio.gather(*(other(number) for number in range(6)))
        await one()
        return await others

    for number, tokens in enumerate(asyncio.run(together())):
        assert tokens == reference.greedy(llama, prompt_of(20 + number, 50 + number), 80)


# --- deaths and transfers -------------------------------------------------------------------------------------------


class Edited:
    """A session with an ended edit, one that goes on and one at positions, and its next tokens."""

    def __init__(self, folder: Path, model: str, address: str) -> None:
        hooks, prompt = Hooked(folder), prompt_of(300, 15)
        s = djinn.Session(model, address=address)
        first = s.steer("blocks.1", V, scale=2)
        tokens = prompt + go_on(s, prompt)
        first.remove()
        s.patch(vector(23, 2, WIDTH), "blocks.0.hook_mlp_out", positions=[3, 400])
        s.steer("logits", vector(24, VOCABULARY))
        changes = [
            Change("blocks.1.hook_resid_post", ops.add(V, 2), end=len(tokens) - 1),
            Change("blocks.0.hook_mlp_out", ops.replace(vector(23, 2, WIDTH)), positions=[3, 400]),
            Change("logits", ops.add(vector(24, VOCABULARY)), start=len(tokens) - 1),
        ]
        tokens += hooks.greedy(tokens, NEW, changes)
        assert go_on(s) == tokens[-NEW:]
        self.id, self.tokens, self.edits = s.id, tokens, s.edits()
        self.next = hooks.greedy(tokens, NEW, changes)  # the tokens to come
        s.detach()

    def check(self, address: str) -> None:
        """Checks that tokens, edits and next tokens are as they were."""
        with djinn.Session.attach(self.id, address=address) as s:
            assert s.token_ids() == self.tokens
            assert s.edits() == self.edits and s.info.edits == 2  # that have not ended
            with s.fork() as t:
                assert go_on(t) == self.next
            assert go_on(s) == self.next


@pytest.mark.parametrize("tier", long_except(("host",), ("host", "disk")))
def test_edited_pages_leave_the_device_and_come_back(llama: Path, roomy_daemon: Daemon, tier: Tier) -> None:
    edited = Edited(llama, str(llama), roomy_daemon.address)
    djinn.pause(edited.id, tier, address=roomy_daemon.address)
    djinn.unpause(edited.id, address=roomy_daemon.address)
    edited.check(roomy_daemon.address)


def test_a_session_saved_with_its_kv(llama: Path, roomy_daemon: Daemon, tmp_path: Path) -> None:
    """The file's KV contains the effect of the edits, which then are no edits any more."""
    model, prompt = Hooked(llama), prompt_of(40, 16)
    with djinn.Session(str(llama), address=roomy_daemon.address) as s:
        s.steer("blocks.2", V, scale=3)
        tokens = prompt + go_on(s, prompt)
        s.save(tmp_path / "edited")
    with djinn.load_session(tmp_path / "edited", address=roomy_daemon.address) as t:
        assert t.info.foreign_kv and t.edits() == []
        # The last token's KV is computed again if nothing follows it: see docs/guide/export.md.
        over = Change(WHERE, ops.add(V, 3), end=len(tokens) - 1)
        assert go_on(t) == model.greedy(tokens, NEW, [over])


def test_kv_of_a_client_can_be_edited_only_from_its_end_on(llama: Path, roomy_daemon: Daemon) -> None:
    model, prompt = Hooked(llama), prompt_of(40, 17)
    with djinn.Session(str(llama), address=roomy_daemon.address) as s:
        tokens = prompt + go_on(s, prompt)
        kv = s.kv()
    with djinn.Session.from_kv(str(llama), tokens, kv, address=roomy_daemon.address) as t:
        with pytest.raises(djinn.InvalidRequest, match="cannot be computed again"):
            t.patch(V, "blocks.1", positions=[3])
        t.steer("blocks.2", V, scale=3)
        change = Change(WHERE, ops.add(V, 3), start=len(tokens) - 1)
        assert go_on(t) == model.greedy(tokens, NEW, [change])
