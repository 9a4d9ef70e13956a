from __future__ import annotations

import asyncio
import struct
from pathlib import Path

import numpy as np
import pytest

import djinn_client as djinn
from djinn_client.protocol import (
    Embed,
    Embedded,
    Failure,
    FilesHandedOver,
    Generate,
    Generated,
    GetRecord,
    HandOverFiles,
    KeepRecord,
    ListRecords,
    Record,
    RecordInfo,
    RecordKept,
    Records,
    Timings,
    Usage,
)
from djinn_client.protocol.fields.bounds import unpack
from djinn_client.protocol.fields.conversations import Conversation
from tests.support.scripted_daemon import Line, ScriptedDaemon

INFO = RecordInfo(record="r", model="llama", session="s-1", length=3, nbytes=4, created=1.5)


def generated(id: int) -> Generated:
    return Generated(
        id=id, text="Rhine", token_ids=[1], finish_reason="stop", usage=Usage(), timings=Timings(), session="s-1"
    )


def asking(asked: list[Generate]):
    def script(line: Line) -> None:
        line.welcome()
        asked.append(line.expect(Generate))
        line.send(generated(asked[-1].id))

    return script


def embedding(line: Line) -> None:
    """Each input's vector is the number of its tokens or characters, and 0.5."""
    line.welcome()
    while (request := line.receive()) is not None:
        assert isinstance(request, Embed)
        sizes = [len(text) for text in request.texts] or [len(unpack(row)) for row in request.packed]
        vectors = b"".join(struct.pack("<2f", size, 0.5) for size in sizes)
        line.send(Embedded(id=request.id, vectors=vectors, width=2, tokens=sizes, pooling=request.pooling or "mean"))


class TestCalls:
    def test_a_text_is_a_chat_s_only_message(self, daemon: ScriptedDaemon) -> None:
        asked: list[Generate] = []
        address = daemon.play(asking(asked))
        reply = djinn.chat("llama", "Name a river.", key="k", expected_wait_s=2.0, max_tokens=9, address=address)
        assert (reply.text, reply.session) == ("Rhine", "s-1")
        (request,) = asked
        assert request.conversation == Conversation(model="llama", key="k", expected_wait_s=2.0)
        assert (request.session, request.max_tokens) == ("", 9)
        assert request.chat is not None
        assert request.chat.messages == b'[{"role": "user", "content": "Name a river."}]'

    def test_a_prompt_goes_on_from_a_record(self, daemon: ScriptedDaemon) -> None:
        asked: list[Generate] = []
        djinn.generate("llama", [1, 2], after="r", priority="batch", address=daemon.play(asking(asked)))
        assert asked[0].conversation == Conversation(model="llama", after="r", priority="batch")
        assert asked[0].token_ids == [1, 2]

    def test_asyncio(self, daemon: ScriptedDaemon) -> None:
        asked: list[Generate] = []
        address = daemon.play(asking(asked), asking(asked), embedding)

        async def calls() -> djinn.Embeddings:
            with pytest.warns(DeprecationWarning, match="is AsyncClient"):  # the names of the last release
                chat, generate, embed = djinn.chat_async, djinn.generate_async, djinn.embed_async
            assert (await chat("llama", [{"role": "user", "content": "x"}], address=address)).text
            assert (await generate("llama", "x", key="k", address=address)).text
            return await embed("llama", ["ab"], address=address)  # type: ignore[no-any-return]

        assert list(asyncio.run(calls())) == [[2.0, 0.5]]
        assert [request.conversation for request in asked] == [
            Conversation(model="llama"),
            Conversation(model="llama", key="k"),
        ]

    def test_the_files_of_a_folder_are_handed_over(self, daemon: ScriptedDaemon, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{}")
        asked: list[Generate] = []

        def script(line: Line) -> None:
            line.welcome()
            wanted = line.expect(Generate)
            line.send(Failure(id=wanted.id, code="files_wanted", message="hand them over"))
            handed = line.expect(HandOverFiles)
            line.send(FilesHandedOver(id=handed.id, model="theirs"))
            asked.append(line.expect(Generate))
            line.send(generated(asked[-1].id))

        djinn.generate(str(tmp_path), "x", key="k", address=daemon.play(script))
        assert asked[0].conversation == Conversation(model="theirs", key="k")


class TestMistakes:
    @pytest.mark.parametrize(
        ("options", "told"),
        [
            ({"key": 3}, "key is 3; it must be a text"),
            ({"priority": "top"}, "priority is 'top'; it must be one of interactive, agent, batch"),
            ({"expected_wait_s": -1.0}, "expected_wait_s is -1"),
            ({"n": 2}, "n is for generate and chat of a session"),
        ],
    )
    def test_are_told_before_a_daemon_is_asked(self, options, told: str) -> None:
        with pytest.raises(djinn.InvalidRequest, match=told):
            djinn.generate("llama", "x", address="/nowhere", **options)

    def test_an_option_that_does_not_exist(self) -> None:
        with pytest.raises(TypeError, match="no such option: kye"):
            djinn.chat("llama", "x", address="/nowhere", kye="k")  # type: ignore[call-arg]

    def test_texts_and_tokens_in_one_call(self) -> None:
        with pytest.raises(djinn.InvalidRequest, match="both kinds in two calls"):
            djinn.embed("llama", ["x", [1]], address="/nowhere")


class TestEmbeddings:
    def test_embed_returns_a_vector_for_each_text(self, daemon: ScriptedDaemon) -> None:
        found = djinn.embed("llama", ["abc", "a"], address=daemon.play(embedding))
        assert (len(found), found.width, found.tokens, found.pooling) == (2, 2, [3, 1], "mean")
        assert [found[0], found[-1], *found] == [[3.0, 0.5], [1.0, 0.5], [3.0, 0.5], [1.0, 0.5]]
        with pytest.raises(IndexError):
            found[2]

    def test_one_text_is_one_input(self, daemon: ScriptedDaemon) -> None:
        assert djinn.embed("llama", "abc", address=daemon.play(embedding)).tokens == [3]

    def test_of_tokens_with_a_pooling(self, daemon: ScriptedDaemon) -> None:
        with djinn.Client(daemon.play(embedding)) as client:
            found = client.embed("llama", [[1, 2], range(3)], pooling="last")
        assert (found.tokens, found.pooling) == ([2, 3], "last")

    def test_are_an_array_for_numpy(self, daemon: ScriptedDaemon) -> None:
        found = djinn.embed("llama", ["abc", "a"], address=daemon.play(embedding))
        array = np.asarray(found)
        assert (array.dtype, array.tolist()) == (np.float32, [[3.0, 0.5], [1.0, 0.5]])
        assert np.asarray(found, np.float64).dtype == np.float64


def test_records(daemon: ScriptedDaemon) -> None:
    def script(line: Line) -> None:
        line.welcome()
        kept = line.expect(KeepRecord)
        assert (kept.session, kept.body, kept.record) == ("s-1", b"mine", "r")
        line.send(RecordKept(id=kept.id, record="r"))
        line.send(Records(id=line.expect(ListRecords).id, records=[INFO]))
        got = line.expect(GetRecord)
        line.send(Record(id=got.id, record="r", model="llama", session="s-1", length=3, created=1.5, body=b"mine"))

    with djinn.Client(daemon.play(script)) as client:
        assert client.keep_record("s-1", b"mine", name="r") == "r"
        assert client.records() == [INFO]
        assert client.record("r").body == b"mine"
