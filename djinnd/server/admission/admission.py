"""Checks of requests before an engine sees them. Each function takes values, and returns nothing or raises an error."""

from __future__ import annotations

from collections.abc import Sequence

from djinn_client import protocol
from djinn_client.errors import InvalidRequest, NoTokenizer, PromptTooLong, TokenOutOfRange
from djinn_client.protocol.fields.points import Point, PointMap
from djinn_client.protocol.requests import DEFAULT_TOKENS
from djinnd.config.schema import MAX_KEEP_ALIVE_S

MAX_NEW_TOKENS = (1 << 31) - 1  # an output ends earlier, at the end of the context
MAX_DEADLINE_S = 86400.0
LEAST_TARGET_S = 1e-3
MAX_STOPS = 16
MAX_STOP_LENGTH = 256  # characters
MAX_STOP_TOKENS = 256
MAX_LOGPROBS = 20
MAX_PROMPT_LOGPROBS_BYTES = 4 << 20  # of a reply: 87,000 tokens with their 5 likeliest
MAX_LOGITS_BYTES = 1 << 30
MAX_POINTS = 1024  # names in a request
MAX_POINT_LENGTH = 256  # characters
MAX_TRACE_STEPS = 100
MAX_TRACE_SECONDS = 60.0


def expect(is_valid: bool, field: str, value: float | None, wanted: str) -> None:
    """Raises InvalidRequest for a field's value that is not valid. No comparison with NaN is true, so NaN is invalid
    where a range is required."""
    if not is_valid:
        told = f"{value:g}" if isinstance(value, float) else value
        raise InvalidRequest(f"{field} is {told}; it must be {wanted}", field=field)


def check_generate(request: protocol.Generate, model: protocol.ModelInfo, lacking: str) -> None:
    """Checks everything that is known before the prompt is tokenised. `lacking`: why the model takes no text; empty if
    it takes text. Raises InvalidRequest, TokenOutOfRange, NoTokenizer."""
    request.sampling.validate()
    if [request.text, request.token_ids, request.chat].count(None) < 2:
        raise InvalidRequest("give the prompt as text, as token ids or as a chat, not as two of them")
    if isinstance(most := request.max_tokens, int):
        wanted = f"from 0 to {MAX_NEW_TOKENS}, or None: to the end of the context"
        expect(0 <= most <= MAX_NEW_TOKENS, "max_tokens", most, wanted)
    if request.chat is not None and (request.prefix_space is not None or not request.skip_special_tokens):
        told = "prefix_space and skip_special_tokens=False are for text prompts: a chat's template and format decide"
        raise InvalidRequest(told, field="chat")
    check_tokens([*request.sampling.logit_bias], model)
    _check_hints(request)
    for field, likeliest in (("logprobs", request.logprobs), ("prompt_logprobs", request.prompt_logprobs)):
        expect(likeliest is None or 0 <= likeliest <= MAX_LOGPROBS, field, likeliest, f"from 0 to {MAX_LOGPROBS}")
    if request.prompt_logprobs is not None and request.capture:
        told = "a call with prompt_logprobs cannot capture: capture the point `logits`, or make two calls"
        raise InvalidRequest(told, field="prompt_logprobs")
    if len(request.stop_token_ids) > MAX_STOP_TOKENS:
        count = len(request.stop_token_ids)
        raise InvalidRequest(f"{count} stop tokens are too many: at most {MAX_STOP_TOKENS}", field="stop_token_ids")
    check_tokens(request.stop_token_ids, model)
    _check_stops(request.stop)
    if lacking and (request.text is not None or request.chat is not None or request.stop):
        raise NoTokenizer(f"{model.name} takes no text, as {lacking}: give token ids, and no stop strings")
    if lacking and request.token_bytes:
        raise NoTokenizer(f"the bytes of {model.name}'s tokens are unknown, as {lacking}: leave token_bytes out")


def most_tokens(request: protocol.Generate, prompt_tokens: int, session_tokens: int, model: protocol.ModelInfo) -> int:
    """Returns the number of tokens that a call may generate behind its prompt, which fits. A call that continues from a
    breakpoint was checked when it began, and gets the room that is left. Raises InvalidRequest."""
    room, wanted = model.max_context - session_tokens - prompt_tokens, request.max_tokens
    if not isinstance(wanted, int):
        most = room if wanted is None else min(DEFAULT_TOKENS, room)
    elif wanted <= room or request.resume:
        most = min(wanted, room)
    else:
        raise InvalidRequest(
            f"max_tokens is {wanted:,}, and there is room for {room:,}: {model.name} takes {model.max_context:,} "
            f"tokens, the session has {session_tokens:,} and the prompt {prompt_tokens:,}; max_tokens=None generates "
            "to the end of the context",
            field="max_tokens",
            session_tokens=session_tokens,
            prompt_tokens=prompt_tokens,
            room=room,
        )
    if request.sampling.min_tokens > most:
        told = f"min_tokens is {request.sampling.min_tokens:,}; it must be at most max_tokens, which is {most:,} here"
        raise InvalidRequest(told, field="min_tokens")
    if not (most or prompt_tokens or request.capture or request.resume):
        told = "max_tokens is 0, which only computes a prompt, and there is none"
        raise InvalidRequest(told, field="max_tokens")
    return most


def check_prompt(
    prompt: Sequence[int], session_tokens: int, model: protocol.ModelInfo, room: int, *, is_text: bool = False
) -> None:
    """Checks the length and the tokens of a prompt. `room` is the number of tokens that must fit behind it. `is_text`:
    the model's own tokenizer has produced the tokens. Raises InvalidRequest, TokenOutOfRange, PromptTooLong."""
    if not prompt and not session_tokens:
        raise InvalidRequest("the session is empty: the first call needs a prompt")
    length = session_tokens + len(prompt)
    if length + room > model.max_context:
        raise PromptTooLong(
            f"the session has {session_tokens:,} tokens and the prompt {len(prompt):,}; {model.name} takes "
            f"{model.max_context - room:,} in all{' before the first new one' if room else ''}: truncate the session, "
            "or shorten the prompt",
            session_tokens=session_tokens,
            prompt_tokens=len(prompt),
            max_context=model.max_context,
        )
    check_tokens(prompt, model, is_text=is_text)


def check_tokens(tokens: Sequence[int], model: protocol.ModelInfo, *, is_text: bool = False) -> None:
    """Raises TokenOutOfRange. Negative ids cannot be encoded on the wire."""
    highest = max(tokens, default=0)
    if highest >= model.vocab:
        told = f"{model.name} has {model.vocab:,} tokens, 0 to {model.vocab - 1}"
        raise TokenOutOfRange(
            f"the tokenizer of {model.name} makes token {highest} of this text, but {told}: the checkpoint's tokenizer "
            "belongs to another model, or has tokens that the weights lack; give token ids"
            if is_text
            else f"token {highest} at position {tokens.index(highest)} is out of range: {told}",
            token=highest,
            vocab=model.vocab,
        )


def points_of(model: protocol.ModelInfo) -> PointMap:
    assert model.points is not None, "a model that is loaded knows its points"
    return model.points


def points_named(names: Sequence[str], model: protocol.ModelInfo, field: str) -> dict[str, Point]:
    """Maps each name to its point; a name with * maps to one point for each block. `field` is the request's field, for
    errors. Raises InvalidRequest."""
    wanted = list(dict.fromkeys(names))
    if len(wanted) > MAX_POINTS:
        told = f"{len(wanted):,} points are too many: at most {MAX_POINTS:,} names; a * stands for every block"
        raise InvalidRequest(told, field=field, limit=MAX_POINTS)
    longest = max(map(len, wanted), default=0)
    if longest > MAX_POINT_LENGTH:
        raise InvalidRequest(f"a point's name has {longest:,} characters: at most {MAX_POINT_LENGTH}", field=field)
    return points_of(model).resolve_all(wanted)


def numbers_to_end(wanted: Sequence[int] | None, there: Sequence[int], given: int, kind: str) -> list[int]:
    """The requested numbers that exist; None requests all. `given`: the last number that the session has given to an
    edit or breakpoint. Raises InvalidRequest for a number that it never gave."""
    for number in wanted or ():
        if not 1 <= number <= given:
            told = f"its {kind}s are 1 to {given}" if given else "it has had none"
            raise InvalidRequest(f"the session has no {kind} {number}: {told}", field=f"{kind}s")
    return list(there if wanted is None else filter(set(wanted).__contains__, there))


def check_forward(request: protocol.Forward, session_tokens: int, model: protocol.ModelInfo) -> None:
    """Checks a forward pass. Raises InvalidRequest, TokenOutOfRange, PromptTooLong."""
    if not request.token_ids:
        raise InvalidRequest("a forward pass needs at least one token", field="token_ids")
    check_prompt(request.token_ids, session_tokens, model, room=0)
    nbytes = len(request.token_ids) * model.vocab * 4
    if nbytes > MAX_LOGITS_BYTES:
        most = MAX_LOGITS_BYTES // (model.vocab * 4)
        raise InvalidRequest(
            f"the logits of {len(request.token_ids):,} tokens are {nbytes:,} bytes, the limit is {MAX_LOGITS_BYTES:,}: "
            f"at most {most:,} tokens a call",
            bytes=nbytes,
            limit=MAX_LOGITS_BYTES,
        )


def check_truncate(length: int, session_tokens: int) -> None:
    """Checks the length of a truncation. Raises InvalidRequest."""
    if not 0 <= length <= session_tokens:
        raise InvalidRequest(f"the session has {session_tokens:,} tokens and cannot be cut to {length}", field="length")


def check_pause(request: protocol.PauseSession) -> None:
    """Checks the tier of a pause. Raises InvalidRequest."""
    if request.tier == "device":
        raise InvalidRequest("a paused session's pages leave the device: pause it to host or disk", field="tier")


def public_tokens(request: protocol.PublishPrefix, session_tokens: int, page_size: int) -> int:
    """Returns the number of tokens that the request makes public: whole pages only. Raises InvalidRequest."""
    wanted = session_tokens if request.tokens is None else request.tokens
    if wanted > session_tokens:
        raise InvalidRequest(f"the session has {session_tokens:,} tokens, not {wanted:,}", field="tokens")
    public = wanted - wanted % page_size
    if public <= 0:
        raise InvalidRequest(
            f"{wanted:,} tokens are less than a page, and only full pages are shared: publish at least {page_size:,}",
            field="tokens",
            page_size=page_size,
        )
    return public


def check_load(request: protocol.LoadModel | protocol.PlanModel | protocol.ShareModel) -> None:
    """Checks the sizes and times of a load. Raises InvalidRequest."""
    expect(request.kv_bytes >= 0, "kv_bytes", request.kv_bytes, "a size, or 0: the daemon decides")
    for name in ("host_kv_bytes", "disk_kv_bytes"):
        nbytes = getattr(request, name, None)
        expect(nbytes is None or nbytes >= 0, name, nbytes, "a size, or None: the daemon decides")
    if request.placing is not None:
        request.placing.validate()
    keep_alive = getattr(request, "keep_alive_s", None)
    wanted = f"0 (never) or up to {MAX_KEEP_ALIVE_S:g} seconds, a year"
    expect(keep_alive is None or 0 <= keep_alive <= MAX_KEEP_ALIVE_S, "keep_alive_s", keep_alive, wanted)


def check_plan(request: protocol.PlanModel) -> None:
    """Checks the memory sizes of a plan. Raises InvalidRequest."""
    check_load(request)
    wanted = "0 (the device's budget) or a size"
    expect(request.memory_bytes >= 0, "memory_bytes", request.memory_bytes, wanted)


def check_share(request: protocol.ShareModel) -> None:
    """Checks the settings of a shared model. Raises InvalidRequest."""
    check_load(request)
    if not request.placing.keep_host:
        raise InvalidRequest("keep_host must be True: the copy on the host is a shared model's only one")


def check_budget(memory_bytes: int) -> None:
    """Checks a budget of device memory. Raises InvalidRequest."""
    expect(memory_bytes >= 1, "memory_bytes", memory_bytes, "1 byte or more")


def check_trace(request: protocol.GetTrace) -> None:
    """Checks the length of a trace. Raises InvalidRequest."""
    expect(1 <= request.steps <= MAX_TRACE_STEPS, "steps", request.steps, f"from 1 to {MAX_TRACE_STEPS}")
    wanted = f"more than 0 and at most {MAX_TRACE_SECONDS:g}"
    expect(0 < request.seconds <= MAX_TRACE_SECONDS, "seconds", request.seconds, wanted)


def check_scored(likeliest: int, prompt_tokens: int, may_stop: bool) -> None:
    """Checks a call with prompt_logprobs. `may_stop`: the call may reach a breakpoint of the session. Raises
    InvalidRequest."""
    if may_stop:
        told = "a call with prompt_logprobs cannot stop, and the session has breakpoints: remove them, or fork before"
        raise InvalidRequest(told, field="prompt_logprobs")
    token_bytes = 4 + 8 * likeliest
    if prompt_tokens * token_bytes > MAX_PROMPT_LOGPROBS_BYTES:
        raise InvalidRequest(
            f"the log probabilities of {prompt_tokens:,} tokens with the {likeliest} likeliest are "
            f"{prompt_tokens * token_bytes:,} bytes, the limit is {MAX_PROMPT_LOGPROBS_BYTES:,}: at most "
            f"{MAX_PROMPT_LOGPROBS_BYTES // token_bytes:,} tokens a call; send the prompt in parts",
            field="prompt_logprobs",
            bytes=prompt_tokens * token_bytes,
            limit=MAX_PROMPT_LOGPROBS_BYTES,
        )


def _check_hints(request: protocol.Generate) -> None:
    expect(request.expected_tokens >= 0, "expected_tokens", request.expected_tokens, "0 (not known) or a count")
    wanted = f"from 0 (none) to {MAX_DEADLINE_S:g} seconds, a day"
    expect(0.0 <= request.deadline_s <= MAX_DEADLINE_S, "deadline_s", request.deadline_s, wanted)
    wanted = f"0 (no target), or from {LEAST_TARGET_S:g} to {MAX_DEADLINE_S:g} seconds"
    for field, target in (("between_tokens_s", request.between_tokens_s), ("first_token_s", request.first_token_s)):
        expect(not target or LEAST_TARGET_S <= target <= MAX_DEADLINE_S, field, target, wanted)


def _check_stops(stops: Sequence[str]) -> None:
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"{len(stops)} stop strings are too many: at most {MAX_STOPS}", field="stop")
    if not all(stops):
        raise InvalidRequest("a stop string is empty", field="stop")
    longest = max(map(len, stops), default=0)
    if longest > MAX_STOP_LENGTH:
        raise InvalidRequest(f"a stop string has {longest} characters: at most {MAX_STOP_LENGTH}", field="stop")
