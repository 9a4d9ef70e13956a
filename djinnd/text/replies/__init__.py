"""Reads replies of chat models: reasoning, content, and tool calls, while the text arrives. No I/O.

form = reply_format(template, tokenizer_config)
parser = ReplyParser(form, prompt, tools_by_name(tools))
for piece in pieces:
    events = parser.feed(piece)
events = parser.finish()
"""

from djinnd.text.replies.detection import NAMES, reply_format
from djinnd.text.replies.events import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning
from djinnd.text.replies.format import ReplyFormat
from djinnd.text.replies.parser import ReplyParser
from djinnd.text.replies.tools import Tools, tools_by_name

__all__ = [
    "NAMES",
    "CallArguments",
    "CallBegin",
    "CallEnd",
    "Content",
    "Event",
    "Reasoning",
    "ReplyFormat",
    "ReplyParser",
    "Tools",
    "reply_format",
    "tools_by_name",
]
