"""Chat templates in the structure of the families that people use, written for these tests."""

CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
# For djinn-tiny, whose one special token ends a turn.
TURNS = """\
{%- for message in messages %}
{%- if message.content is none %}{{ raise_exception('a message needs content') }}{% endif %}
{{- '# ' + message.role + '\\n' + message.content + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '# assistant\\n' }}{% endif %}
"""
# For djinn-tiny, with tools as Hermes and Qwen write them.
TOOLS = """\
{%- if tools %}# tools, called as <tool_call>{"name": ..., "arguments": ...}</tool_call>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% endif %}
{%- for message in messages %}
{{- '# ' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' + (call.function | tojson) + '</tool_call>' }}
{%- endfor %}
{{- eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '# assistant\\n' }}{% endif %}
"""
