"""Replies in the formats of model families, with their parsed contents."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from djinn_client.protocol.fields.chat import ToolCallDelta
from djinnd.text.replies.detection import reply_format
from djinnd.text.replies.events import CallEnd, Content, Event, Reasoning
from djinnd.text.replies.format import ReplyFormat
from djinnd.text.replies.parser import ReplyParser
from djinnd.text.replies.tools import tools_by_name

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "units": {"type": "string", "enum": ["metric", "imperial"]},
                    "options": {"type": "object"},
                },
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]
BY_NAME = tools_by_name(TOOLS)
D_BEGIN, D_END, D_CALL, D_SEP, D_CALL_END = (
    f"<\uff5c{words}\uff5c>"
    for words in (
        "tool\u2581calls\u2581begin",
        "tool\u2581calls\u2581end",
        "tool\u2581call\u2581begin",
        "tool\u2581sep",
        "tool\u2581call\u2581end",
    )
)


DSML = "\uff5cDSML\uff5c"


class Call(NamedTuple):
    name: str
    arguments: str


class Sample(NamedTuple):
    """`says`: reasoning, content and calls, in order."""

    form: str
    text: str
    says: tuple[Reasoning | Content | Call, ...]
    prompt: str = ""
    template: str = ""

    @property
    def format(self) -> ReplyFormat:
        return reply_format(self.template, {}, self.form)


PARIS = Call("get_weather", '{"city": "Paris"}')
TWO_DAYS = Call("get_weather", '{"city": "Paris", "days": 2}')
NOW = Call("now", "{}")

SAMPLES = (
    Sample("plain", "Hello <tool_call> you\n", (Content("Hello <tool_call> you\n"),)),
    Sample(
        "hermes",
        'Let me see.\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
        '<tool_call>{"arguments": {}, "name": "now"}</tool_call>',
        (Content("Let me see."), PARIS, NOW),
    ),
    Sample(
        "hermes",
        'I look.\n</think>\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
        (Reasoning("I look."), PARIS),
        prompt="<|im_start|>assistant\n<think>\n",
        template="<think></think>",
    ),
    Sample(
        "hermes",
        "<think>\nI look.\n</think>\n\nThe tag <think> begins it.",
        (Reasoning("I look."), Content("The tag <think> begins it.")),
        template="<think></think>",
    ),
    Sample(
        "qwen3-coder",
        "Let me see.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n2\n"
        "</parameter>\n</function>\n</tool_call>\n<function=now>\n</function>",
        (Content("Let me see."), TWO_DAYS, NOW),
    ),
    Sample(
        "qwen3-coder",
        '<tool_call><function=get_weather><parameter=city>\n"a\\b"\n\n</b>\n</parameter></function></tool_call>',
        (Call("get_weather", r'{"city": "\"a\\b\"\n\n</b>"}'),),
    ),
    Sample(
        "glm",
        "<think>Hm</think>See.<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        '<arg_key>options</arg_key>\n<arg_value>{"a": [1]}</arg_value>\n</tool_call><tool_call>now</tool_call>',
        (Reasoning("Hm"), Content("See."), Call("get_weather", '{"city": "Paris", "options": {"a": [1]}}'), NOW),
        template="<think></think>",
    ),
    Sample(
        "llama3",
        '{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "now", "parameters": {}}',
        (PARIS, NOW),
    ),
    Sample(
        "llama3",
        '<|python_tag|>{"type": "function", "name": "now", "parameters": {}}',
        (NOW,),
    ),
    Sample(
        "llama3",
        '<|python_tag|>brave_search.call(query="a \\"b\\"")',
        (Call("brave_search", '{"query": "a \\"b\\""}'),),
    ),
    Sample("llama3", '{"name": "Ada", "born": 1815}', (Content('{"name": "Ada", "born": 1815}'),)),
    Sample(
        "mistral",
        '[THINK]Hm[/THINK]See.[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]now[CALL_ID]aB3dE6gH9[ARGS]{}',
        (Reasoning("Hm"), Content("See."), PARIS, NOW),
        template="[THINK][/THINK]",
    ),
    Sample(
        "mistral-v3",
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "now", "arguments": "{}"}]',
        (PARIS, NOW),
    ),
    Sample(
        "deepseek-v3",
        f"See.{D_BEGIN}{D_CALL}function{D_SEP}get_weather\n"
        f'```json\n{{"city": "Paris"}}\n```{D_CALL_END}\n'
        f"{D_CALL}function{D_SEP}now\n```json\n{{}}\n```{D_CALL_END}{D_END}",
        (Content("See."), PARIS, NOW),
    ),
    Sample(
        "deepseek-v3.1",
        f'Hm</think>See.{D_BEGIN}{D_CALL}get_weather{D_SEP}{{"city": "Paris"}}{D_CALL_END}{D_CALL}now{D_SEP}{{}}'
        f"{D_CALL_END}{D_END}",
        (Reasoning("Hm"), Content("See."), PARIS, NOW),
        prompt="<think>",
        template="<think></think>",
    ),
    Sample(
        "minimax",
        'Hm</think>See.\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n'
        '<parameter name="days">2</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        (Reasoning("Hm"), Content("See."), TWO_DAYS, NOW),
        prompt="<think>\n",
        template="<think></think>",
    ),
    Sample(
        "minimax",
        '<minimax:tool_call><invoke name="now"></invoke>and <invoke name=',
        (NOW, Content("and <invoke name=")),
    ),
    Sample(
        "deepseek-v3.2",
        f'See.\n\n<{DSML}function_calls>\n<{DSML}invoke name="get_weather">\n'
        f'<{DSML}parameter name="city" string="true">Paris</{DSML}parameter>\n'
        f'<{DSML}parameter name="days" string="false">2</{DSML}parameter>\n</{DSML}invoke>\n'
        f'<{DSML}invoke name="now">\n</{DSML}invoke>\n</{DSML}function_calls>',
        (Content("See."), TWO_DAYS, NOW),
    ),
    Sample(
        "seed-oss",
        "<seed:think>Hm</seed:think>See.<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n"
        "<parameter=days>2</parameter>\n</function>\n</seed:tool_call>",
        (Reasoning("Hm"), Content("See."), TWO_DAYS),
        template="</seed:think>",
    ),
    Sample(
        "kimi",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "Paris"}<|tool_call_end|><|tool_calls_section_end|>',
        (PARIS,),
    ),
    Sample(
        "gemma4",
        '<|channel>thought\nHm<channel|>See.<|tool_call>call:get_weather{city:<|"|>a:{b"<|"|>,days:2}<tool_call|>',
        (Reasoning("Hm"), Content("See."), Call("get_weather", '{"city":"a:{b\\"","days":2}')),
    ),
    Sample(
        "granite",
        'See.<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "now", "arguments": {}}]',
        (Content("See."), PARIS, NOW),
    ),
    Sample(
        "functiongemma",
        "<start_function_call>call:get_weather{city:<escape>Paris<escape>}<end_function_call>",
        (Call("get_weather", '{"city":"Paris"}'),),
    ),
    Sample(
        "gemma3",
        'See.\n```tool_code\nget_weather(city="Paris", days=2)\n```\nThere.',
        (Content("See."), TWO_DAYS, Content("There.")),
    ),
    Sample("pythonic", "[get_weather(city='Paris', days=2), now()]", (TWO_DAYS, NOW)),
    Sample("pythonic", "[A link](here)", (Content("[A link](here)"),)),
    Sample(
        "lfm2",
        'See.<|tool_call_start|>[get_weather(city="Paris")]<|tool_call_end|>',
        (Content("See."), PARIS),
    ),
    Sample(
        "harmony",
        "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
        '<|constrain|>json<|message|>{"city": "Paris"}',
        (Reasoning("Hm"), PARIS),
        prompt="<|start|>assistant",
    ),
    Sample(
        "harmony",
        "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>Hello <b>\n",
        (Reasoning("Hm"), Content("Hello <b>\n")),
        prompt="<|start|>assistant",
    ),
    Sample(
        "harmony",
        " to=functions.now<|channel|>commentary json<|message|>{}<|call|>",
        (NOW,),
        prompt="<|start|>assistant",
    ),
    Sample("harmony", "and on<|return|>", (Content("and on"),), prompt="<|channel|>final<|message|>Hello "),
    Sample("harmony", "No header, and <|x", (Content("No header, and <|x"),), prompt="<|start|>assistant"),
)


Part = Reasoning | Content | Call


def read(form: ReplyFormat, pieces: Iterable[str], prompt: str = "") -> tuple[Part, ...]:
    """Reads a whole reply."""
    parser = ReplyParser(form, prompt, BY_NAME)
    events = [event for piece in pieces for event in parser.feed(piece)]
    return says([*events, *parser.finish()])


def says(events: Iterable[Event]) -> tuple[Part, ...]:
    """The parts of a reply, whole. A call's events follow one another, up to its end."""
    parts: list[Part] = []
    open_call = -1
    for event in events:
        last = parts[-1] if parts else None
        match event:
            case Content(text) | Reasoning(text):
                assert open_call < 0
                if isinstance(last, Content | Reasoning) and type(last) is type(event):
                    parts[-1] = last._replace(text=last.text + text)
                else:
                    parts.append(event)
            case ToolCallDelta(index=index) if event.name:
                assert open_call < 0 and event.id and index == sum(isinstance(part, Call) for part in parts)
                parts.append(Call(event.name, event.arguments))
                open_call = index
            case ToolCallDelta(index=index):
                assert isinstance(last, Call) and index == open_call and not event.id
                parts[-1] = last._replace(arguments=last.arguments + event.arguments)
            case CallEnd(index):
                assert index == open_call
                open_call = -1
    return tuple(parts)
