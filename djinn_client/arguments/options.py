"""The keyword arguments of calls, and the checked messages that are made of them."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypedDict, TypeVar

import msgspec

from djinn_client.arguments.messages import Message, chat_input
from djinn_client.arguments.mistakes import mistake
from djinn_client.errors import InvalidRequest, TokenOutOfRange
from djinn_client.protocol import Conversation, Generate, Request, Sampling, Signal
from djinn_client.protocol.fields.output_format import output_format
from djinn_client.protocol.fields.placing import ring_bytes

M = TypeVar("M", bound=Request | Signal | Conversation)

TOKEN_LIMIT = 1 << 31


class GenerateOptions(TypedDict, total=False):
    """The keyword arguments of `generate` and `stream`.

    max_tokens           the most new tokens, for which the context must have room; None: to the end of the
                         context; 0: only the prompt is computed. Without this option, 256, or fewer at the
                         end of the context
    n                    number of outputs of one prompt, at most 128, in the reply's `choices`; default 1; for
                         `generate` and `chat` only
    temperature          0 (the default) is greedy; sampling draws from softmax(logits / temperature)
    top_k                only the k likeliest tokens; 0 (the default) is off
    top_p                only the likeliest tokens that together have this probability; 1 (the default) is off
                         (nucleus sampling, Holtzman et al. 2020)
    min_p                only tokens with at least this part of the likeliest one's probability; 0 (the default) is off
                         (Nguyen et al. 2024)
    repetition_penalty   1 (the default) is off; tokens of prompt and output (CTRL, Keskar et al. 2019)
    presence_penalty     0 (the default) is off; subtracted from the logits of tokens in the output
    frequency_penalty    0 (the default) is off; subtracted once for each time that the output has the token
    logit_bias           {token id: number to add to its logit}, from -100 to 100, for at most 1,024 tokens
    min_tokens           the least new tokens: before them, neither an end token nor `stop_token_ids` is chosen,
                         and `stop` matches in later text only; 0 (the default) is off
    seed                 the same call with the same seed gives the same tokens; None: the daemon draws one
    stop                 strings that end the output, at most 16 of at most 256 characters; the one that ended it is not
                         part of the text
    stop_token_ids       tokens that end the output, at most 256
    ignore_eos           go on after the model's own end token
    skip_special_tokens  False: special tokens such as "<tool_call>" appear in the text; default True
    parse_special        False: control strings in the prompt, such as "<|im_end|>", stay ordinary text; default True
    prefix_space         whether the space that SentencePiece tokenizers put before a text is put before this one; None
                         (the default): if the text is the session's first, as a text that goes on continues a word
    logprobs             None (the default) is off; n, from 0 to 20: natural-log probability of each chosen token and
                         the n likeliest
    prompt_logprobs      None (the default) is off; n, from 0 to 20: the same for each token of the prompt, in the
                         reply's `prompt_logprobs`
    token_bytes          True: the reply's `token_bytes` has the bytes of each generated token and of each token that
                         logprobs name; a token may be a part of a character
    expected_tokens      likely number of new tokens; 0 (the default): not known. Advice, as is the next:
    deadline_s           seconds from now until the last token is needed, at most a day; 0 (the default): none.
                         Of one user's calls in one class, those that are likely to be late go first
    between_tokens_s     most seconds between two tokens, as a target; 0: none, for throughput; None (the default): the
                         target of the session's class
    first_token_s        most seconds to the first token, likewise
    response_format      {"type": "json_object"}, or {"type": "json_schema", "schema": a JSON schema}: the output is
                         such a JSON text, and ends where that does
    regex                a regular expression that the whole output matches
    grammar              a Lark grammar that the whole output follows; of these three, at most one
    """

    max_tokens: int | None
    n: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    min_tokens: int
    seed: int | None
    stop: str | Sequence[str]
    stop_token_ids: Iterable[int]
    ignore_eos: bool
    skip_special_tokens: bool
    parse_special: bool
    prefix_space: bool | None
    logprobs: int | None
    prompt_logprobs: int | None
    token_bytes: bool
    expected_tokens: int
    deadline_s: float
    between_tokens_s: float | None
    first_token_s: float | None
    response_format: Mapping[str, Any] | None
    regex: str | None
    grammar: str | None


class OfChats(TypedDict, total=False):
    """The keyword arguments that only chats have.

    tools               functions that the model may call: [{"type": "function", "function": {"name", "description",
                        "parameters": JSON schema}}, …]
    tool_choice         "auto" (the default); "none": no calls; "required": at least one call; "function:NAME":
                        a call of this function
    parallel_tools      False: at most one call in an answer; default True
    continue_final      True: the answer continues the text of the last message, which must be the assistant's
    template_arguments  further values for the model's template, as {"enable_thinking": False}
    """

    tools: Iterable[Mapping[str, Any]] | None
    tool_choice: str
    parallel_tools: bool
    continue_final: bool
    template_arguments: Mapping[str, Any] | None


class ChatOptions(GenerateOptions, OfChats, total=False):
    """The keyword arguments of `chat` and `chat_stream`: GenerateOptions and OfChats. Special tokens never are a part
    of an answer's text."""


class PlacingOptions(TypedDict, total=False):
    """The keyword arguments of `load` and `plan` that say where a model's blocks go. Without any, and where all are
    None, the daemon's configuration holds; with one, the defaults below hold for the others.

    resident             an int: number of blocks that stay on the device; a float from 0.0 to 1.0: their share;
                         "auto" (the default): as many as fit
    ring_gb              device memory for the ring that the others stream through, in 10^9 bytes; default: by slots
    slots                of the ring, each for the largest streamed block; default: the engine decides
    packing              False: no block is stored in the lossless 12-bit code; default True
    quantise             "fp8" or "int8": matrices that the checkpoint has in 16 or 32 bits are quantised when they are
                         loaded, which changes results; every reply says so in its notes; default: they are not
    kv_dtype             "fp8": keys and values are rounded to e4m3 and take a byte each, which changes results; every
                         reply says so in its notes; "auto" (the default): they are in the dtype of computing
    speculation          "auto": a step also runs tokens that a session is likely to get next, as its own text
                         and its user's other sessions say, and keeps those that it would have sampled; no token
                         changes; "off" (the default): it does not. {"draft": NAME}: as "auto", and where these texts
                         say nothing, another model of the daemon's configuration guesses, which has the same tokens
    keep_host            False: the copy in host memory is dropped once every block is resident; default True
    """

    resident: int | float | Literal["auto"] | None
    ring_gb: float | None
    slots: int | None
    packing: bool | None
    quantise: Literal["fp8", "int8"] | None
    kv_dtype: Literal["auto", "fp8"] | None
    speculation: Literal["auto", "off"] | Mapping[str, str] | None
    keep_host: bool | None


_SAMPLING = frozenset(Sampling.__struct_fields__)
_OF_CHATS = OfChats.__annotations__.keys()


def chat_request(session: str, messages: Iterable[Message], options: ChatOptions, *, stream: bool) -> Generate:
    """Raises as `generate_request`."""
    of_chat = {name: value for name, value in options.items() if name in _OF_CHATS}
    others: Any = {name: value for name, value in options.items() if name not in _OF_CHATS}
    request = generate_request(session, None, others, stream=stream)
    request.chat = chat_input(messages, **of_chat)  # type: ignore[arg-type]  # a TypedDict's values by their names
    return request


def generate_request(
    session: str, prompt: str | Iterable[int] | None, options: GenerateOptions, *, stream: bool
) -> Generate:
    """Raises TypeError for an option that does not exist, InvalidRequest for one of the wrong type."""
    fields: dict[str, Any] = dict(options)
    if unknown := sorted(fields.keys() - GenerateOptions.__annotations__.keys()):
        raise TypeError(f"no such option: {', '.join(unknown)}; there are {', '.join(GenerateOptions.__annotations__)}")
    if fields.pop("n", 1) != 1:
        raise InvalidRequest("n is for generate and chat of a session: fork one, and call each fork", field="n")
    sampling = {name: fields.pop(name) for name in _SAMPLING & fields.keys()}
    form = output_format(*(fields.pop(name, None) for name in ("response_format", "regex", "grammar")))
    if isinstance(fields.get("stop"), str):
        fields["stop"] = [fields["stop"]]
    if "stop_token_ids" in fields:
        fields["stop_token_ids"] = token_ids(fields["stop_token_ids"])
    if isinstance(prompt, str):
        fields["text"] = prompt
    elif prompt is not None:
        fields["token_ids"] = token_ids(prompt)
    request = build(Generate, session=session, sampling=sampling, stream=stream, **fields)
    request.format = form
    return request


def placing_fields(options: PlacingOptions) -> dict[str, Any] | None:
    """The fields of a Placing; None: as configured. Raises TypeError for an option that does not exist, InvalidRequest
    for gigabytes that are none."""
    fields: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if unknown := sorted(options.keys() - PlacingOptions.__annotations__.keys()):
        raise TypeError(f"no such option: {', '.join(unknown)}; there are {', '.join(PlacingOptions.__annotations__)}")
    if fields.get("resident") == "auto":
        fields["resident"] = None
    if fields.get("kv_dtype") == "auto":
        fields["kv_dtype"] = ""
    if "speculation" in fields:
        fields |= _speculation(fields["speculation"])
    if "ring_gb" in fields:
        fields["ring_bytes"] = ring_bytes(fields.pop("ring_gb"))
    return fields or None


def _speculation(value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping) and value.keys() == {"draft"} and isinstance(value["draft"], str) and value["draft"]:
        return {"speculation": True, "draft": value["draft"]}
    if value not in ("auto", "off"):
        told = f"speculation is {value!r}; it must be 'auto', 'off' or {{'draft': NAME}}, with the name of a model"
        raise InvalidRequest(told, field="speculation")
    return {"speculation": value == "auto"}


def token_ids(tokens: Iterable[Any]) -> list[int]:
    """One row of token ids as a list, from any iterable of integers or a 1-D array or tensor.

    Raises InvalidRequest for anything else (nested rows, floats), TokenOutOfRange for an id beyond any vocabulary.
    """
    if hasattr(tokens, "tolist"):
        tokens = tokens.tolist()
    try:
        ids = [operator.index(token) for token in tokens]
    except TypeError as error:
        if isinstance(tokens, Sequence) and tokens and isinstance(tokens[0], Mapping):
            told = "these are messages: chat(messages) takes them, and generate takes a text or token ids"
            raise InvalidRequest(told, field="text") from None
        raise InvalidRequest(f"token ids must be one row of integers: {error}", field="token_ids") from error
    for place, token in enumerate(ids):
        if not 0 <= token < TOKEN_LIMIT:
            raise TokenOutOfRange(f"token {token} at position {place} is not a token id", token=token, position=place)
    return ids


def signal_message(session: str, kind: str, expected_s: float | None, tool: str = "") -> Signal:
    """Raises InvalidRequest."""
    seconds = 0.0 if expected_s is None else expected_s
    kind = kind.upper() if type(kind) is str else kind
    if type(kind) is str and type(seconds) is float and type(tool) is str:
        signal = Signal(session, kind, seconds, tool)  # 3 us less of 20, behind an answer that has cooled the caches
    else:
        signal = build(Signal, session=session, kind=kind, expected_s=seconds, tool=tool)
    signal.validate()
    return signal


def build(kind: type[M], /, **fields: Any) -> M:
    """The message with these fields; a request's id is set when it is sent. Raises InvalidRequest where a type is
    wrong."""
    try:
        return msgspec.convert({"id": 0, "type": kind.__struct_config__.tag, **fields}, kind)
    except (msgspec.ValidationError, OverflowError) as error:
        raise InvalidRequest(mistake(kind, fields, str(error))) from error
