"""A chat template of our own for GLM-5.2's format, as a checkpoint would ship one."""

TEMPLATE = """[gMASK]<sop>
{%- if enable_thinking is not defined or enable_thinking -%}
<|system|>Reasoning Effort: {{ 'High' if reasoning_effort == 'high' else 'Max' }}
{%- endif -%}
{%- if tools -%}
<|system|>
# Tools

You may call one or more functions to help with the user's request.

The functions are described inside <tools></tools>, one JSON object per line:
<tools>
{% for tool in tools %}
{{ (tool.function if 'function' in tool else tool) | tojson }}
{% endfor %}
</tools>

Write every call as the function's name followed by its arguments, each as a key and a value:
<tool_call>function name<arg_key>first key</arg_key><arg_value>first value</arg_value>\
<arg_key>second key</arg_key><arg_value>second value</arg_value>...</tool_call>
Strings are written as they are, all other values as JSON.
{%- endif -%}
{%- set ns = namespace(last_user=-1) -%}
{%- for m in messages if m.role == 'user' %}{% set ns.last_user = messages.index(m) %}{% endfor -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}<|user|>{{ m.content }}
{%- elif m.role == 'system' -%}<|system|>{{ m.content }}
{%- elif m.role == 'assistant' -%}
<|assistant|>
{%- set content = m.content -%}
{%- set reasoning = m.reasoning_content if m.reasoning_content is string else '' -%}
{%- if not reasoning and '</think>' in content -%}
{%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
{%- set content = content.split('</think>')[-1] -%}
{%- endif -%}
{%- set keep = loop.index0 > ns.last_user or (clear_thinking is defined and not clear_thinking) -%}
<think>{{ reasoning if keep else '' }}</think>{{ content.strip() }}
{%- for call in m.tool_calls or [] -%}
<tool_call>{{ call.function.name }}
{%- for k, v in call.function.arguments.items() -%}
<arg_key>{{ k }}</arg_key><arg_value>{{ v if v is string else v | tojson }}</arg_value>
{%- endfor -%}
</tool_call>
{%- endfor -%}
{%- elif m.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif -%}
<tool_response>{{ m.content }}</tool_response>
{%- else -%}
{{ raise_exception('unknown role ' + m.role) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|assistant|><think>{{ '' if enable_thinking is not defined or enable_thinking else '</think>' }}
{%- endif -%}
"""
