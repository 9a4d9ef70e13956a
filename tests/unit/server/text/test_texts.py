"""Texts with real text workers, which read tokenizers as strangers write them."""

from __future__ import annotations

import asyncio
import gc
import os
import weakref
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from djinn_client.errors import GrammarRejected, InvalidRequest, ModelRejected, PromptTooLong, QuotaExceeded, TextFailed
from djinn_client.files.model_files import ModelFiles
from djinn_client.protocol import Generate
from djinn_client.protocol.fields.bounds import pack
from djinn_client.protocol.fields.chat import ChatDelta
from djinnd.config import Limits, Model
from djinnd.jobs.text import BeginReading, ChatReading, CheckGrammar, ReadText, ReadTokens
from djinnd.server.models.text import ModelText, TokenizedPrompt
from djinnd.server.text.texts import LONG_TEXT, SHORT_TEXT, Texts
from djinnd.text.reader import ReadingRules
from tests.support.checkpoint_files import slow_to_encode, tiny_with
from tests.support.confined import text_workers
from tests.support.daemon import is_alive
from tests.support.serving import TINY

ME = os.geteuid()
ROOM = 4096


def played(play: Callable[[Texts], Awaitable[None]], **limits: float) -> None:
    async def main() -> None:
        texts = Texts(Limits(**limits))  # type: ignore[arg-type]
        try:
            await play(texts)
        finally:
            await texts.close()

    asyncio.run(main())


async def opened(texts: Texts, folder: Path = TINY, is_configured: bool = False, user: int = ME) -> ModelText:
    files = ModelFiles.open(str(folder))
    configured = Model(path=str(folder)) if is_configured else None
    text = await texts.open(user, "m", files, configured)
    weakref.finalize(text, files.close)
    return text


async def prompt(texts: Texts, text: ModelText, words: str, room: int = ROOM, user: int = ME) -> list[int]:
    return (await texts.prepare(text, user, Generate(id=1, session="s", text=words), True, room))[0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "model"


@pytest.mark.parametrize("length", [10, SHORT_TEXT + 1, LONG_TEXT + 1])
def test_wherever_a_text_is_tokenised_the_tokens_are_the_same(length: int) -> None:
    words = ("def größe(x):\n    return x + 1  # 😀\n" * length)[:length]

    async def play(texts: Texts) -> None:
        trusted, foreign = await opened(texts, is_configured=True), await opened(texts)
        assert trusted.vocabulary is not None and foreign.vocabulary is None
        assert trusted.eos == foreign.eos == {0}
        room = length  # a token for each character is more than there are
        assert await prompt(texts, trusted, words, room) == await prompt(texts, foreign, words, room)
        assert texts.time.seconds(ME) > 0
        assert texts.time.use(ME).used > 0 == texts.time.use(ME + 1).used

    played(play)


def test_a_configured_model_starts_no_worker_for_texts_that_are_not_long() -> None:
    async def play(texts: Texts) -> None:
        text = await opened(texts, is_configured=True)
        for words in ("x = 1", "x = 1\n" * SHORT_TEXT):
            assert await prompt(texts, text, words, 1 << 20)
        assert texts.time.seconds(ME) == 0

    played(play)


@pytest.mark.parametrize("is_configured", [True, False])
def test_tokens_are_named_wherever_their_text_is_read(is_configured: bool) -> None:
    async def play(texts: Texts) -> None:
        text = await opened(texts, is_configured=is_configured)
        tokens = await prompt(texts, text, "def größe(x): 😀")
        named = await texts.name(text, ME, pack([*tokens, *tokens, 1 << 20]))
        assert b"".join(named[token] for token in tokens).decode() == "def größe(x): 😀"
        assert named[1 << 20] == b"" and named.keys() == {*tokens, 1 << 20}

    played(play)


def test_a_text_that_cannot_fit_is_refused_untouched() -> None:
    async def play(texts: Texts) -> None:
        text = await opened(texts, is_configured=True)
        with pytest.raises(PromptTooLong, match="no token stands for more than"):
            await prompt(texts, text, "x" * 10_000_000)
        assert texts.time.seconds(ME) == 0
        with pytest.raises(PromptTooLong, match="has 5,000 tokens; in m there is room for 4,096"):
            await prompt(texts, await opened(texts), " =" * 5000)

    played(play)


def test_a_job_that_takes_too_long_ends_the_worker_and_the_next_one_starts_another(folder: Path) -> None:
    async def play(texts: Texts) -> None:
        text = await opened(texts, tiny_with(folder, slow_to_encode))
        worker = texts.worker(ME)
        with pytest.raises(TextFailed, match=r"limits\.text_seconds"):
            await prompt(texts, text, "a" * 3000 + "b")
        assert await prompt(texts, text, "def f") and texts.worker(ME) is not worker

    played(play, text_seconds=0.3)


def test_an_error_keeps_nothing_of_the_call_that_got_it() -> None:
    async def play(texts: Texts) -> None:
        text = await opened(texts)
        gone = weakref.ref(text)
        with pytest.raises(GrammarRejected):
            await texts.ask(text, ME, CheckGrammar(text.number, "no grammar", wants_table=False))
        del text
        await asyncio.sleep(0)  # until then, the loop itself holds the answer
        assert gone() is None

    gc.collect()
    gc.disable()
    try:
        played(play)
    finally:
        gc.enable()


def test_only_a_user_beyond_its_cpu_minute_waits(folder: Path) -> None:
    async def play(texts: Texts) -> None:
        text = await opened(texts, tiny_with(folder, slow_to_encode))

        async def until_refused() -> None:  # a worker's start counts too, and takes longer on a slow machine
            for _ in range(10):
                with pytest.raises(TextFailed):
                    await prompt(texts, text, "a" * 3000 + "b")

        with pytest.raises(QuotaExceeded, match="try again in"):
            await until_refused()
        assert await prompt(texts, text, "x", user=ME + 1 if ME else 65534)

    played(play, text_seconds=0.3, text_seconds_per_minute=1.5)


def test_a_tokenizer_that_is_too_large_or_damaged_is_refused(folder: Path) -> None:
    async def play(texts: Texts) -> None:
        tiny_with(folder, lambda tokenizer: None)
        with pytest.raises(ModelRejected, match="at most 1,000 are read"):
            await opened(texts, folder)

    played(play, tokenizer_bytes=1000)

    async def damaged(texts: Texts) -> None:
        (folder / "tokenizer.json").write_text("{")
        with pytest.raises(ModelRejected, match=r"m: .*tokenizer\.json cannot be read"):
            await opened(texts, folder)

    played(damaged)


def test_a_worker_that_lacks_memory_says_which_limit_that_was(folder: Path) -> None:
    async def play(texts: Texts) -> None:
        text = await opened(texts)
        with pytest.raises(TextFailed, match=r"(limits\.text_memory|MemoryError)"):
            await prompt(texts, text, "x = 1\n" * 1_000_000, 10_000_000)
        assert await prompt(texts, text, "x = 1")

    played(play, text_memory=64 << 20)


def test_stop_strings_are_looked_up_by_the_worker_too() -> None:
    async def play(texts: Texts) -> None:
        text = await opened(texts)
        request = Generate(id=1, session="s", token_ids=[5, 6], stop=["<|endoftext|>", "end"])
        assert await texts.prepare(text, ME, request, True, ROOM) == TokenizedPrompt([5, 6], frozenset({0}))
        request.stop = ["a<|endoftext|>"]
        with pytest.raises(InvalidRequest, match="skip_special_tokens"):
            await texts.prepare(text, ME, request, True, ROOM)

    played(play)


def test_workers_forget_a_text_that_nobody_refers_to_and_one_of_closed_files_fails() -> None:
    async def play(texts: Texts) -> None:
        text = await opened(texts)
        worker = texts.worker(ME)
        assert list(worker.models) == [text.number]
        text.files.close()
        assert await prompt(texts, text, "x = 1")
        await worker.end()
        with pytest.raises(TextFailed, match="has been unloaded"):
            await prompt(texts, text, "x = 1")
        other = await opened(texts)
        worker = texts.worker(ME)
        assert list(worker.models) == [other.number]
        del other
        gc.collect()
        await asyncio.sleep(0)  # the collector may run in any thread; the loop's own tells the worker
        assert not worker.models

    played(play)


def test_no_worker_outlives_its_owner() -> None:
    async def play(texts: Texts) -> None:
        others = set(text_workers(os.getpid()))  # of daemons that other tests have started
        text = await opened(texts)
        waiting = asyncio.ensure_future(prompt(texts, text, "x = 1"))
        await asyncio.sleep(0)
        (pid,) = set(text_workers(os.getpid())) - others
        await texts.close()
        assert not is_alive(pid)
        with pytest.raises(TextFailed, match="was ended"):
            await waiting

    played(play)


def test_a_model_without_an_end_token_says_so(folder: Path) -> None:
    async def play(texts: Texts) -> None:
        assert not (await opened(texts)).notes
        tiny_with(folder, lambda config: config.pop("eos_token_id", None), "config.json")
        (folder / "generation_config.json").unlink()
        (folder / "tokenizer_config.json").unlink()
        assert "no end token" in (await opened(texts, folder)).notes[0]

    played(play)


def test_an_answer_is_read_by_the_worker_with_the_checkpoint_s_own_response_template(folder: Path) -> None:
    fields = {"thinking": {"open": "[", "close": "]"}, "content": {}}
    template = {"start_anchor": "#", "fields": fields}

    async def play(texts: Texts) -> None:
        text = await opened(texts, answering(folder, template))
        worker = texts.reading_worker(text, ME)
        assert worker is not None
        worker.tell(BeginReading(1, text.number, [], ReadingRules([]), ChatReading("#", b"", ["stop"], True)))
        tokens = await prompt(texts, text, "[Hm.] Well, stop it")
        said: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        worker.ask(ReadTokens(1, tokens, last=True), said.set_result)
        read = await said
        assert isinstance(read, ReadText), read
        assert (read.text, read.delta, read.stopped_by) == ("Well, ", ChatDelta("Hm."), "stop")
        assert read.stopped_after is not None and read.stopped_after < len(tokens)

    played(play)


def answering(folder: Path, template: dict[str, object]) -> Path:
    """A checkpoint with a chat template, and this response template."""
    tiny_with(folder, lambda settings: settings.update(response_template=template), "tokenizer_config.json")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder
