"""Chooses where texts are tokenised and tokens are decoded.

    model          short text      longer text            long text              tokens
    configured     the loop        a thread of a few      the text worker        the loop
    any other      the principal's text worker, for everything

The tokenizer of a configured model is trusted with the loop's time for short texts. A text that cannot fit is refused
before it is tokenised.
"""

from __future__ import annotations

import asyncio
import os
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TypeVar

from djinn_client.errors import DjinnError, InvalidRequest, PromptTooLong, QuotaExceeded, TextFailed
from djinn_client.files.model_files import ModelFiles
from djinn_client.protocol import Generate
from djinn_client.protocol.fields.chat import ChatInput
from djinnd import config
from djinnd.config import Limits
from djinnd.jobs import text as jobs
from djinnd.server.handover.stopping import leave_signals_to_the_loop
from djinnd.server.models.text import ModelText, TokenizedPrompt
from djinnd.server.quotas.cpu_time import CpuTime
from djinnd.server.text.text_worker import MOST_MODELS, TextWorker
from djinnd.text.chat.conversation import read_tools
from djinnd.text.chat.templates import read_template
from djinnd.text.encoder import TextRules
from djinnd.text.end_tokens import MAX_END_TOKENS
from djinnd.text.vocabulary import MAX_TAIL, TokensOnly, Vocabulary, text_files

SHORT_TEXT = 2 << 10  # characters: a millisecond on the loop
SHORT_CHAT = 1 << 10  # bytes of messages and tools: half a millisecond, with the template
LONG_CHAT = 32 << 10  # bytes: a template and its filters hold the interpreter's lock for some milliseconds
SHORT_TOKENS = 512  # tokens to decode: a millisecond on the loop
LONG_TOKENS = 8 << 10  # tokens to decode: some milliseconds in a thread
LONG_TEXT = 128 << 10  # characters: a tenth of a second in a thread, which cannot be stopped
_THREADS = 2
_IDLE = 60.0  # seconds without a question, after which a worker ends

T = TypeVar("T")


class Texts:
    """Owns the text workers, one a principal at the most, and the threads for configured models' texts."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.time = CpuTime("text_seconds_per_minute", "text workers and inspections", limits.text_seconds_per_minute)
        self.grammar_time = CpuTime(
            "grammar_seconds_per_minute", "outputs with a format", limits.grammar_seconds_per_minute
        )
        self._workers: dict[int, TextWorker] = {}  # by user; they take questions
        self._ending: set[TextWorker] = set()  # they take no more questions, and still exist
        self._turns: dict[tuple[int, str], asyncio.Lock] = {}
        self._threads = ThreadPoolExecutor(_THREADS, "djinn-text", leave_signals_to_the_loop)
        self._sweep: asyncio.TimerHandle | None = None

    async def open(
        self, user: int, name: str, files: ModelFiles, configured: config.Model | None, template: str = ""
    ) -> ModelText:
        """Opens the text side of a model that is being loaded, for `user`. `files` stay the model's. `configured`: its
        section of the configuration. `template`, or else the configuration's, replaces the checkpoint's for chats.
        Raises ModelRejected, TextFailed, QuotaExceeded."""
        if configured is not None:
            loop = asyncio.get_running_loop()
            if configured.chat_template and not template:
                template = await loop.run_in_executor(self._threads, read_template, configured.chat_template)
            vocabulary = await loop.run_in_executor(self._threads, _read, name, files, template)
            return ModelText(name, files, vocabulary, template, configured.reply_format)
        text = ModelText(name, files, template=template)
        weakref.finalize(text, self._forget_soon, asyncio.get_running_loop(), text.number)
        async with self._turn(user, "worker"):
            self.time.expect(user)
            worker = self.worker(user)
            told = await self._ask(worker, *_opening(text, self.limits))
        if len({*told.eos, *told.turn_ends}) > MAX_END_TOKENS + 1:
            raise TextFailed("the text worker has named more end tokens than any model has")
        text.told = told
        worker.models[text.number] = None
        return text

    async def prepare(self, text: ModelText, user: int, request: Generate, starts: bool, room: int) -> TokenizedPrompt:
        """Prepares the prompt of a request without a chat. `room`: tokens that fit. Raises PromptTooLong,
        InvalidRequest, TextFailed, QuotaExceeded."""
        given = request.token_ids or []
        if request.text is None and not request.stop:
            return TokenizedPrompt(given)
        rules = TextRules(starts, request.parse_special, request.prefix_space)
        vocabulary, prompt = text.vocabulary, request.text or ""
        if vocabulary is not None:
            stop_tokens = vocabulary.stop_tokens(request.stop, request.skip_special_tokens)
            if request.text is None:
                return TokenizedPrompt(given, stop_tokens)
            if len(prompt) <= SHORT_TEXT:
                return TokenizedPrompt(vocabulary.encode(prompt, rules), stop_tokens)
            _expect_fits(text.name, vocabulary, prompt, room)
            if len(prompt) <= LONG_TEXT:
                tokens = await self.in_thread(user, partial(vocabulary.encode, prompt, rules))
                return TokenizedPrompt(tokens, stop_tokens)
        question = jobs.Encode(text.number, request.text, room, request.stop, request.skip_special_tokens, rules)
        prepared = await self._encoded(text, user, question)
        return prepared._replace(tokens=given) if request.text is None else prepared

    async def prepare_chat(
        self, text: ModelText, user: int, chat: ChatInput, stops: Sequence[str], room: int
    ) -> TokenizedPrompt:
        """Prepares all tokens of a chat, up to the answer. Raises as `prepare`, and InvalidRequest with the template's
        own words."""
        vocabulary, size = text.vocabulary, len(chat.messages) + len(chat.tools) + len(chat.arguments)
        if vocabulary is None or size > LONG_CHAT:
            prompt = await self._encoded(text, user, jobs.Encode(text.number, chat, room, list(stops)))
        else:
            encode = partial(vocabulary.encode_chat, chat)
            encoded = encode() if size <= SHORT_CHAT else await self.in_thread(user, encode)
            prompt = TokenizedPrompt(encoded.tokens, vocabulary.stop_tokens(stops, skip_special=False), encoded.tail)
        if not chat.tools or chat.tool_choice == "none":
            return prompt
        read = partial(read_tools, chat.tools)
        return prompt._replace(tools=read() if len(chat.tools) <= SHORT_CHAT else await self.in_thread(user, read))

    async def texts_of(self, text: ModelText, user: int, tokens: list[int], spelled: bool) -> list[str]:
        """Returns the text of the tokens in one piece or, if `spelled`, the vocabulary's spelling of each token. Raises
        TextFailed, QuotaExceeded."""
        vocabulary = text.vocabulary
        if vocabulary is None or len(tokens) > LONG_TOKENS:
            return (await self.ask(text, user, jobs.Decode(text.number, tokens, spelled))).texts
        decode = partial(vocabulary.texts, tokens, spelled)
        return decode() if len(tokens) <= SHORT_TOKENS else await self.in_thread(user, decode)

    async def in_thread(self, user: int, act: Callable[[], T]) -> T:
        async with self._turn(user, "thread"):
            return await asyncio.get_running_loop().run_in_executor(self._threads, act)

    async def _encoded(self, text: ModelText, user: int, question: jobs.Encode) -> TokenizedPrompt:
        answer = await self.ask(text, user, question)
        if isinstance(answer, jobs.TooMany):
            raise _too_long(text.name, f"has {answer.tokens:,} tokens", question.most)
        return TokenizedPrompt(answer.tokens, frozenset(answer.stop_tokens), answer.tail[-MAX_TAIL:])

    async def ask(self, text: ModelText, user: int, question: jobs.Question[T]) -> T:
        """Asks the user's text worker when it is the user's turn, for configured models, too. Raises the error in the
        answer, TextFailed, QuotaExceeded."""
        async with self._turn(user, "worker"):
            self.time.expect(user)
            return await self._ask(self.worker_with(text, user), question)

    async def name(self, text: ModelText, user: int, tokens: bytes) -> dict[int, bytes]:
        """Returns the bytes of tokens: 32 bits each, little-endian; each may be there many times. Raises TextFailed,
        QuotaExceeded."""
        if (naming := text.token_bytes) is not None:
            return await self.in_thread(user, lambda: naming.of({*memoryview(tokens).cast("i")}))
        return (await self.ask(text, user, jobs.SpellTokens(text.number, tokens))).token_bytes

    def follow(self, limits: Limits) -> None:
        """Applies limits to workers that start from now on, and to CPU time."""
        self.limits = limits
        self.time.follow(limits.text_seconds_per_minute)
        self.grammar_time.follow(limits.grammar_seconds_per_minute)

    def reading_worker(self, text: ModelText, user: int) -> TextWorker | None:
        """Returns the text worker that decodes a run's tokens; None if the server decodes them. Raises
        QuotaExceeded."""
        if not text.is_read_by_workers:
            return None
        self.time.expect(user)
        return self.worker_with(text, user)

    def worker(self, user: int) -> TextWorker:
        """The user's text worker, which is started if there is none. Raises QuotaExceeded if there are too many."""
        worker = self._workers.get(user)
        if worker is None:
            if len(self._workers) >= self.limits.text_workers:
                told = f"the daemon has {len(self._workers)} text workers, its limit (limits.text_workers): try again"
                raise QuotaExceeded(told, quota="text_workers", limit=self.limits.text_workers)
            charge = partial(self.time.charge, user)
            worker = self._workers[user] = TextWorker(user, self.limits, charge, self._ended)
            self._sweep_later()
        return worker

    def worker_with(self, text: ModelText, user: int) -> TextWorker:
        """The user's text worker, which has the model's tokenizer or is about to open it. Raises QuotaExceeded."""
        worker = self.worker(user)
        if text.number not in worker.models:
            while len(worker.models) >= MOST_MODELS:
                worker.forget(next(iter(worker.models)))
            question, fds = _opening(text, self.limits)
            worker.models[text.number] = None
            worker.ask(question, lambda answer: _opened(worker, text.number, answer), fds)
        worker.models.move_to_end(text.number)
        return worker

    async def close(self) -> None:
        """Kills all workers at once. Returns when none is left."""
        if self._sweep is not None:
            self._sweep.cancel()
        for worker in [*self._workers.values(), *self._ending]:
            await worker.end()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _forget_soon(self, loop: asyncio.AbstractEventLoop, model: int) -> None:
        """Makes the workers forget a model. The garbage collector may call this in any thread."""
        with suppress(RuntimeError):  # the loop is closed: the daemon has ended
            loop.call_soon_threadsafe(self._forget, model)

    def _forget(self, model: int) -> None:
        for worker in self._workers.values():
            worker.forget(model)

    async def _ask(self, worker: TextWorker, question: jobs.Question[T], fds: Sequence[int] = ()) -> T:
        """Asks a worker. Raises the error in its answer. If the caller stops waiting, the job continues within its
        limits."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        worker.ask(question, partial(_settle, future), fds)
        try:
            return await future
        finally:
            del future  # or an error would refer to itself through this frame, and keep the callers' objects

    def _turn(self, user: int, where: str) -> asyncio.Lock:
        """Returns the lock by which a user has one text at a time in the threads, and one in its worker."""
        return self._turns.setdefault((user, where), asyncio.Lock())

    def _ended(self, worker: TextWorker) -> None:
        del self._workers[worker.user]
        self._ending.add(worker)
        worker.gone.add_done_callback(lambda _: self._ending.discard(worker))

    def _sweep_later(self) -> None:
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(_IDLE / 2, self._end_idle)

    def _end_idle(self) -> None:
        """Ends workers that were not asked anything for a while, or that have no model any more."""
        self._sweep = None
        now = time.monotonic()
        for worker in list(self._workers.values()):
            if worker.is_idle and (now - worker.used > _IDLE or not worker.models):
                worker.kill()
        if self._workers:
            self._sweep_later()


def _settle(future: asyncio.Future[T], answer: T | DjinnError) -> None:
    """Gives the answer to the caller, unless it was cancelled."""
    if future.done():
        return
    if isinstance(answer, DjinnError):
        future.set_exception(answer)
    else:
        future.set_result(answer)


def _read(name: str, files: ModelFiles, template: str) -> Vocabulary | TokensOnly:
    """Reads a vocabulary, and computes the properties that take a look at all of its tokens. Blocks."""
    vocabulary = Vocabulary.read(name, files, template=template)
    if isinstance(vocabulary, Vocabulary):
        vocabulary.characters_per_token  # noqa: B018
        with suppress(InvalidRequest):  # the first chat gets this error
            vocabulary.chats.compile()
    return vocabulary


def _expect_fits(name: str, vocabulary: Vocabulary, prompt: str, room: int) -> None:
    """Raises PromptTooLong for a text that has too many tokens by its length alone."""
    characters = vocabulary.characters_per_token
    if characters is not None and len(prompt) > room * characters:
        raise _too_long(name, f"has {len(prompt):,} characters, and no token stands for more than {characters}", room)


def _too_long(name: str, what: str, room: int) -> PromptTooLong:
    return PromptTooLong(
        f"the prompt {what}; in {name} there is room for {room:,} tokens: truncate the session, or shorten the prompt",
        max_context=room,
    )


def _opening(text: ModelText, limits: Limits) -> tuple[jobs.OpenModel, list[int]]:
    """Returns the question that opens a model, and its descriptors. Raises TextFailed if the model has been unloaded
    meanwhile."""
    names = text_files(text.files)
    if not names:
        raise TextFailed(f"{text.name} has been unloaded: load it again")
    fds = [os.dup(text.files.descriptor(name)) for name in names]
    return jobs.OpenModel(text.number, text.name, names, limits.tokenizer_bytes, text.template), fds


def _opened(worker: TextWorker, model: int, answer: jobs.ModelOpened | DjinnError) -> None:
    """Forgets a model that the worker could not open. The question that was sent behind it fails, and the next one
    opens the model again."""
    if isinstance(answer, DjinnError):
        worker.models.pop(model, None)
