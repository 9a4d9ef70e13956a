"""Reads replies of chat models: reasoning, content, and tool calls, while the text arrives. No I/O.

form = reply_format(template, tokenizer_config)
parser = ReplyParser(form, prompt, tools_by_name(tools))  # the prompt ends where the reply begins
for piece in pieces:
    events = parser.feed(piece)
events = parser.finish()
"""
