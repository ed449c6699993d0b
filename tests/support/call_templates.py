"""Chat templates that write calls in a form of their own, in the manner of well-known models."""

from __future__ import annotations

from typing import Final

START: Final = """\
{% if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content or '' }}"""
END: Final = """<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
CALLS: Final = "{% for c in m.tool_calls or [] %}{% set f = c.function %}"

QWEN3_CODER: Final = f"""\
{START}{CALLS}
<tool_call>
<function={{{{ f.name }}}}>
{{% for k, v in f.arguments | items %}}<parameter={{{{ k }}}}>
{{{{ v if v is string else v | string }}}}
</parameter>
{{% endfor %}}</function>
</tool_call>{{% endfor %}}{END}"""

GLM: Final = f"""\
{START}{CALLS}
<tool_call>{{{{ f.name }}}}
{{% for k, v in f.arguments.items() %}}<arg_key>{{{{ k }}}}</arg_key>
<arg_value>{{{{ v if v is string else v | tojson(ensure_ascii=False) }}}}</arg_value>
{{% endfor %}}</tool_call>{{% endfor %}}{END}"""

GLM47: Final = f"""\
{START}{CALLS}<tool_call>{{{{ f.name }}}}{{% for k, v in f.arguments.items() %}}<arg_key>{{{{ k }}}}</arg_key>\
<arg_value>{{{{ v if v is string else v | tojson(ensure_ascii=False) }}}}</arg_value>{{% endfor %}}</tool_call>\
{{% endfor %}}{END}"""

MINIMAX: Final = f"""\
{START}{{% if m.tool_calls %}}
<minimax:tool_call>
{CALLS}<invoke name="{{{{ f.name }}}}">
{{% for k, v in f.arguments | items %}}<parameter name="{{{{ k }}}}">\
{{{{ v if v is string else v | tojson }}}}</parameter>
{{% endfor %}}</invoke>
{{% endfor %}}</minimax:tool_call>{{% endif %}}{END}"""

DEEPSEEK_V3: Final = """\
{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '<｜User｜>' + m.content }}{% endif %}\
{% if m.role == 'assistant' and m.content is none %}{{ '<｜Assistant｜><｜tool▁calls▁begin｜>' }}\
{% for c in m.tool_calls %}{{ '<｜tool▁call▁begin｜>' + c['type'] + '<｜tool▁sep｜>' + c['function']['name'] \
+ '\\n```json\\n' + c['function']['arguments'] + '\\n```<｜tool▁call▁end｜>' }}\
{% if not loop.last %}{{ '\\n' }}{% endif %}{% endfor %}\
{{ '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}{% endif %}\
{% if m.role == 'assistant' and m.content is not none %}\
{{ '<｜Assistant｜>' + m.content + '<｜end▁of▁sentence｜>' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"""

DEEPSEEK_V31: Final = """\
{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}\
{{ '<｜User｜>' + m.content + '<｜Assistant｜></think>' }}\
{% elif m.role == 'assistant' %}{{ m.content }}{% if m.tool_calls %}{{ '<｜tool▁calls▁begin｜>' }}\
{% for c in m.tool_calls %}{{ '<｜tool▁call▁begin｜>' + c['function']['name'] + '<｜tool▁sep｜>' + \
c['function']['arguments'] + '<｜tool▁call▁end｜>' }}{% endfor %}{{ '<｜tool▁calls▁end｜>' }}{% endif %}\
{{ '<｜end▁of▁sentence｜>' }}{% endif %}{% endfor %}"""

KIMI: Final = """\
{% for m in messages %}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{{ m.content or '' }}\
{% if m.tool_calls %}<|tool_calls_section_begin|>{% for c in m.tool_calls %}<|tool_call_begin|>{{ c['id'] }}\
<|tool_call_argument_begin|>{{ c['function']['arguments'] | tojson }}<|tool_call_end|>{% endfor %}\
<|tool_calls_section_end|>{% endif %}<|im_end|>{% endfor %}\
{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"""

FUNCTION_GEMMA: Final = """\
{%- macro written(v) -%}{%- if v is string -%}{{ '<escape>' + v + '<escape>' }}\
{%- elif v is boolean -%}{{ 'true' if v else 'false' }}{%- elif v is none -%}null{%- elif v is mapping -%}{{ '{' }}\
{%- for k, item in v | dictsort -%}{{ k }}:{{ written(item) }}{%- if not loop.last %},{% endif -%}\
{%- endfor -%}{{ '}' }}\
{%- elif v is sequence -%}[{%- for item in v -%}{{ written(item) }}{%- if not loop.last %},{% endif -%}{%- endfor -%}]\
{%- else -%}{{ v }}{%- endif -%}{%- endmacro -%}
{{ bos_token }}{%- for m in messages -%}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}
{{ m.content or '' }}{%- for c in m.tool_calls or [] -%}\
{{ '<start_function_call>call:' + c.function.name }}{{ written(c.function.arguments) }}<end_function_call>\
{%- endfor -%}<end_of_turn>
{% endfor -%}{%- if add_generation_prompt -%}<start_of_turn>model
{% endif -%}"""

LFM2: Final = f"""\
{START}{{% if m.tool_calls %}}<|tool_call_start|>[{CALLS}{{{{ f.name }}}}(\
{{% for k, v in f.arguments.items() %}}{{{{ k }}}}={{{{ v | tojson }}}}\
{{% if not loop.last %}}, {{% endif %}}{{% endfor %}})\
{{% if not loop.last %}}, {{% endif %}}{{% endfor %}}]<|tool_call_end|>{{% endif %}}{END}"""

LFM25: Final = f"""\
{START}{{% if m.tool_calls %}}<|tool_call_start|>[{CALLS}{{{{ f.name }}}}(\
{{% for k, v in f.arguments.items() %}}{{{{ k }}}}=\
{{{{ "'" + v + "'" if v is string else v | tojson if v is mapping else v | string }}}}\
{{% if not loop.last %}}, {{% endif %}}{{% endfor %}})\
{{% if not loop.last %}}, {{% endif %}}{{% endfor %}}]<|tool_call_end|>{{% endif %}}{END}"""

APRIEL: Final = """\
{% if tools %}<available_tools>{{ tools | tojson }}</available_tools>{% endif %}\
{% for m in messages %}<|begin_{{ m.role }}|>
{{ m.content or '' }}{% if m.tool_calls %}
<tool_calls>[{% for c in m.tool_calls %}{"name": "{{ c.function.name }}", \
"arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}{% if not loop.last %}, {% endif %}\
{% endfor %}]</tool_calls>{% endif %}
<|end|>
{% endfor %}{% if add_generation_prompt %}<|begin_assistant|>
Here are my reasoning steps:
{% endif %}{# [BEGIN FINAL RESPONSE] #}"""

SEED: Final = f"""\
{START}{CALLS}
<seed:tool_call>
<function={{{{ f.name }}}}>
{{% for k, v in f.arguments.items() %}}<parameter={{{{ k }}}}>{{{{ v if v is string else v | string }}}}</parameter>
{{% endfor %}}</function>
</seed:tool_call>{{% endfor %}}{END}"""

COHERE: Final = """\
{% for m in messages %}<|START_OF_TURN_TOKEN|>{{ '<|CHATBOT_TOKEN|>' if m.role == 'assistant' else '<|USER_TOKEN|>' }}\
{% if m.tool_calls %}<|START_THINKING|>{{ m.tool_plan }}<|END_THINKING|><|START_ACTION|>[
{% for c in m.tool_calls %}
    {"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ c.function.name }}", \
"parameters": {{ c.function.arguments | tojson }}}{% if not loop.last %},{% endif %}

{% endfor %}
]<|END_ACTION|>{% elif m.role == 'assistant' %}<|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>\
{% else %}{{ m.content }}{% endif %}<|END_OF_TURN_TOKEN|>{% endfor %}\
{% if tools %}{{ tools | tojson }}{% endif %}\
{% if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}"""

LISTED: Final = "{% for c in m.tool_calls %}{{ c.function | tojson }}{% if not loop.last %}, {% endif %}{% endfor %}"
HUNYUAN: Final = f"""\
{START}{{% if m.tool_calls %}}<tool_calls>[{LISTED}]</tool_calls>{{% endif %}}{END}\
{{% if enable_thinking is false %}}<think>

</think>
{{% endif %}}{{# <answer></answer> #}}"""
NEMOTRON: Final = f"{START}{{% if m.tool_calls %}}<TOOLCALL>[{LISTED}]</TOOLCALL>{{% endif %}}{END}"

MINICPM: Final = f"""\
{START}{CALLS}<function name="{{{{ f.name }}}}">{{% for k, v in f.arguments.items() %}}<param name="{{{{ k }}}}">\
{{% if v is string and ('<' in v or '&' in v or '\\n' in v) %}}<![CDATA[{{{{ v }}}}]]>\
{{% else %}}{{{{ v }}}}{{% endif %}}</param>{{% endfor %}}</function>
{{% endfor %}}{END}"""

PLAIN_LFM2: Final = f"""\
{{% set ns = namespace(system='') %}}{{% if tools %}}\
{{% set ns.system = 'List of tools: <|tool_list_start|>' + tools | tojson %}}{{% endif %}}\
<|im_start|>system
{{{{ ns.system }}}}<|im_end|>
{{% for m in messages %}}<|im_start|>{{{{ m.role }}}}
{{{{ m.content }}}}{END}"""
"""The template of LFM2, which reads tools but does not write calls."""

DSML: Final = """\
{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}\
{% if m.role == 'user' %}{{ '<｜User｜>' + m.content + '<｜Assistant｜>' }}\
{{ '<think>' if loop.last and enable_thinking is not false else '</think>' }}\
{% elif m.role == 'tool' %}<function_results><result>{{ m.content }}</result></function_results>\
{{ '\\n\\n<think>' if loop.last else '' }}\
{% elif m.role == 'assistant' %}{{ m.content }}{% if m.tool_calls %}{{ '\\n\\n<｜DSML｜WRAPPER>' }}\
{% for c in m.tool_calls %}{{ '\\n<｜DSML｜invoke name="' + c.function.name + '">\\n' }}\
{% for k, v in c.function.arguments.items() %}<｜DSML｜parameter name="{{ k }}" \
string="{{ 'true' if v is string else 'false' }}">{{ v if v is string else v | tojson(ensure_ascii=False) }}\
{{ '</｜DSML｜parameter>\\n' }}{% endfor %}</｜DSML｜invoke>{% endfor %}{{ '\\n</｜DSML｜WRAPPER>' }}{% endif %}\
{{ '<｜end▁of▁sentence｜>' }}{% endif %}{% endfor %}"""

MINIMAX_M3: Final = f"""\
{{%- set mark = ']<]minimax[>[' -%}}
{{%- macro written(v) -%}}{{%- if v is mapping -%}}{{%- for k, each in v.items() -%}}\
{{{{ mark + '<' + k + '>' }}}}{{{{ written(each) }}}}{{{{ mark + '</' + k + '>' }}}}{{%- endfor -%}}\
{{%- elif v is sequence and v is not string -%}}{{%- for each in v -%}}\
{{{{ mark + '<item>' }}}}{{{{ written(each) }}}}{{{{ mark + '</item>' }}}}{{%- endfor -%}}\
{{%- else -%}}{{{{ v if v is string else v | tojson(ensure_ascii=False) }}}}{{%- endif -%}}{{%- endmacro -%}}
{START}{{% if m.tool_calls %}}{{{{ mark + '<tool_call>\\n' }}}}\
{CALLS}{{{{ mark + '<invoke name="' + f.name + '">\\n' }}}}{{% for k, v in f.arguments.items() %}}\
{{{{ mark + '<' + k + '>' }}}}{{{{ written(v) }}}}{{{{ mark + '</' + k + '>\\n' }}}}{{% endfor %}}\
{{{{ mark + '</invoke>\\n' }}}}{{% endfor %}}{{{{ mark + '</tool_call>' }}}}{{% endif %}}{END}\
{{% if thinking %}}<mm:think>{{% endif %}}{{# </mm:think> #}}"""

KIMI_K3: Final = """\
{%- macro open(tag, attributes={}) -%}{{ '<|open|>' + tag }}\
{%- for k, v in attributes.items() -%}{{ ' ' + k + '="' }}{{ v }}{{ '"' }}{%- endfor -%}{{ '<|sep|>' }}{%- endmacro -%}
{%- macro close(tag) -%}{{ '<|close|>' + tag + '<|sep|>' }}{%- endmacro -%}
{%- macro kind(v) -%}{%- if v is boolean -%}boolean{%- elif v is none -%}null{%- elif v is number -%}number\
{%- elif v is string -%}string{%- elif v is mapping -%}object{%- else -%}array{%- endif -%}{%- endmacro -%}
{%- if tools -%}{{ open('message', {'role': 'system', 'type': 'tool-declare'}) }}{{ tools | tojson }}\
{{ close('message') + '<|end_of_msg|>' }}{%- endif -%}
{%- for m in messages -%}{{ open('message', {'role': m.role}) }}\
{%- if m.role == 'assistant' -%}{{ open('think') }}{{ m.reasoning_content or '' }}{{ close('think') }}\
{{ open('response') }}{{ m.content or '' }}{{ close('response') }}\
{%- if m.tool_calls -%}{{ open('tools') }}\
{%- for c in m.tool_calls -%}{{ open('call', {'tool': c.function.name, 'index': loop.index}) }}\
{%- for k, v in c.function.arguments.items() -%}{{ open('argument', {'key': k, 'type': kind(v)}) }}\
{{ v if v is string else v | tojson(ensure_ascii=false) }}{{ close('argument') }}{%- endfor -%}{{ close('call') }}\
{%- endfor -%}{{ close('tools') }}{%- endif -%}\
{%- else -%}{{ m.content }}{%- endif -%}{{ close('message') + '<|end_of_msg|>' }}{%- endfor -%}
{%- if add_generation_prompt -%}{{ open('message', {'role': 'assistant'}) }}\
{{ open('response' if thinking is false else 'think') }}{%- endif -%}"""

HUNYUAN_V3: Final = """\
{%- set HYTK = ':opensource' -%}{%- set sep = '<tool_sep{}>'.format(HYTK) -%}
{%- macro tag(name) -%}{{ '<{}{}>'.format(name, HYTK) }}{%- endmacro -%}
{%- for m in messages -%}{{ '<｜hy_' + m.role + HYTK + '｜>' }}{{ m.content or '' }}\
{%- if m.tool_calls -%}{{ tag('tool_calls') + '\\n' }}{%- for c in m.tool_calls -%}\
{{ tag('tool_call') + c.function.name + sep + '\\n' }}{%- for k, v in c.function.arguments.items() -%}\
{{ tag('arg_key') + k + tag('/arg_key') + '\\n' + tag('arg_value') }}\
{{ v if v is string else v | tojson(ensure_ascii=False) }}{{ tag('/arg_value') + '\\n' }}{%- endfor -%}\
{{ tag('/tool_call') + '\\n' }}{%- endfor -%}{{ tag('/tool_calls') }}{%- endif -%}{%- endfor -%}\
{%- if tools -%}{{ tools | tojson }}{%- endif -%}\
{%- if add_generation_prompt -%}{{ '<｜hy_assistant' + HYTK + '｜>' }}\
{{ tag('think') + tag('/think') if reasoning_effort == 'no_think' else tag('think') }}{%- endif -%}"""

APERTUS: Final = """\
{%- set ns = namespace(is_open=false, has_results=false) -%}
{{ bos_token }}<|developer_start|>{{ tools | tojson if tools else 'disabled' }}<|developer_end|>
{%- for m in messages -%}{%- if m.role == 'user' -%}{{ ']' if ns.has_results }}\
{{ '<|assistant_end|>' if ns.is_open }}\
{%- set ns.is_open = false -%}{%- set ns.has_results = false -%}<|user_start|>{{ m.content }}<|user_end|>
{%- elif m.role == 'assistant' -%}{{ ']' if ns.has_results }}{%- set ns.has_results = false -%}\
{%- if not ns.is_open -%}<|assistant_start|>{%- endif -%}{%- set ns.is_open = true -%}{{ m.content + '' }}\
{%- if m.tool_calls -%}<|tools_prefix|>[{%- for c in m.tool_calls -%}\
{{ '{"' + c.function.name + '": ' + c.function.arguments + '}' }}{{ ', ' if not loop.last }}\
{%- endfor -%}]<|tools_suffix|>\
{%- endif -%}{%- else -%}{{ ', ' if ns.has_results else '[' }}\
{%- set ns.has_results = true -%}{{ m.content }}{%- endif -%}
{%- endfor -%}{%- if add_generation_prompt and not ns.is_open -%}<|assistant_start|>{%- endif -%}
{#- <|inner_prefix|> <|inner_suffix|> -#}"""

GIGACHAT3: Final = """\
{%- macro turn(role, content) -%}{{ role + '<|role_sep|>\\n' }}{{ content }}\
{{ '<|message_sep|>\\n\\n' }}{%- endmacro -%}
{{ bos_token }}{%- if tools -%}{{ turn('function descriptions', tools | tojson) }}{%- endif -%}
{%- for m in messages -%}{{ turn('function result' if m.role == 'tool' else m.role, m.content or '') }}\
{%- if m.tool_calls -%}{%- set f = m.tool_calls[0].function -%}\
{%- set arguments = f.arguments | tojson(ensure_ascii=False) -%}\
{{ turn('function call', '{"name": "' + f.name + '", "arguments": ' + arguments + '}') }}\
{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}{{ 'assistant<|role_sep|>\\n' }}{%- endif -%}"""

SOLAR_OPEN: Final = """\
{{ bos_token }}{%- if tools -%}<|begin|>system<|content|>{{ tools | tojson }}<|end|>{%- endif -%}
{%- for m in messages -%}{%- if m.role == 'assistant' -%}\
{%- if m.reasoning -%}<|begin|>assistant<|think|>{{ m.reasoning }}<|end|>{%- endif -%}\
{%- if m.content or not m.tool_calls -%}<|begin|>assistant<|content|>{{ m.content }}<|end|>{%- endif -%}\
{%- if m.tool_calls -%}<|begin|>assistant<|tool_calls|>{%- for c in m.tool_calls -%}\
<|tool_call:begin|>{{ c.id }}<|tool_call:name|>{{ c.function.name }}<|tool_call:args|>\
{{ c.function.arguments + '' }}<|tool_call:end|>{%- endfor -%}<|calls|>{%- endif -%}\
{%- else -%}<|begin|>{{ m.role }}<|content|>{{ m.content }}<|end|>{%- endif -%}{%- endfor -%}\
{%- if add_generation_prompt -%}<|begin|>assistant{%- endif -%}"""

SOLAR_OPEN2: Final = f"""\
{START}{CALLS}<|tool_call:start|>{{{{ f.name + '\\n' }}}}\
{{% for k, v in f.arguments.items() %}}<|tool_arg:start|>{{{{ k }}}}<|tool_arg:value|>\
{{{{ v if v is string else v | tojson(ensure_ascii=False) }}}}{{{{ '<|tool_arg:end|>\\n' }}}}{{% endfor %}}\
<|tool_call:end|>{{% endfor %}}{END}<|think:start|>{{% if reasoning_effort == 'low' %}}<|think:end|>{{% endif %}}"""

FIREFUNCTION: Final = """\
{%- set suffix = 'Answer with functools[{"name": ..., "arguments": ...}]\\n' + functions + '\\nToday is ' + datetime -%}
{{ bos_token }}{%- for m in messages -%}
{%- if loop.first -%}{{ '<|start_header_id|>system<|end_header_id|>\\n\\n' + suffix + '<|eot_id|>' }}{%- endif -%}
{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | default('', true) | trim }}\
{%- if m.tool_calls -%}{%- set ns = namespace(calls=[]) -%}{%- for c in m.tool_calls -%}\
{%- set ns.calls = ns.calls + ['{"name": "' + c.function.name + '", "arguments": ' + c.function.arguments + '}'] -%}\
{%- endfor -%}{{ ' functools[' + ns.calls | join(', ') + ']' }}{%- endif -%}{{ '<|eot_id|>' }}{%- endfor -%}
{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}"""

MUSE_GLIMMER: Final = """\
{{ bos_token }}{%- if tools -%}{{ '<|start|>system<|message|>' }}{{ tools | tojson }}{{ '<|eot|>' }}{%- endif -%}
{%- for m in messages -%}{%- if m.role != 'assistant' -%}{{ '<|start|>' + m.role + '<|message|>' }}{{ m.content }}\
{{ '<|eot|>' }}{%- else -%}{%- if m.reasoning_content -%}\
{{ '<|start|>assistant to=self<|message|>' + m.reasoning_content + '<|eom|>' }}{%- endif -%}\
{%- for c in m.tool_calls or [] -%}{{ '<|start|>assistant to=' + c.function.name + '<|message|>' }}\
{{ '<atem:function_calls>\\n' }}\
{{ '<atem:invoke name="' + c.function.name + '">\\n' }}{%- for k, v in c.function.arguments.items() -%}\
{{ '<atem:parameter name="' + k + '">' }}{{ v if v is string else v | tojson(ensure_ascii=False) }}\
{{ '</atem:parameter>\\n' }}{%- endfor -%}{{ '</atem:invoke>\\n</atem:function_calls>' }}\
{{ '<|eot|>' if loop.last else '<|eom|>' }}\
{%- else -%}{{ '<|start|>assistant to=user<|message|>' }}{{ m.content }}{{ '<|eot|>' }}{%- endfor -%}{%- endif -%}
{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|start|>assistant' }}{%- endif -%}"""

MISTRAL4: Final = """\
{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}\
{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}\
{{ '[TOOL_CALLS]' + c.function.name + '[ARGS]' }}{{ c.function.arguments | tojson(ensure_ascii=False) }}{% endfor %}\
{{ eos_token }}{% else %}[INST]{{ m.content }}[/INST]{% endif %}{% endfor %}{# [THINK][/THINK] #}"""

UNKNOWN: Final = f"{START}{CALLS}CALL {{{{ f.name }}}} WITH {{{{ f.arguments }}}} PLEASE{{% endfor %}}{END}"

WRITING: Final[dict[str, tuple[str, str]]] = {
    "qwen3_coder": ("qwen3_coder", QWEN3_CODER),
    "glm": ("glm45", GLM),
    "glm47": ("glm45", GLM47),
    "minimax": ("minimax_m2", MINIMAX),
    "deepseek_v3": ("deepseek_v3", DEEPSEEK_V3),
    "deepseek_v31": ("deepseek_v3", DEEPSEEK_V31),
    "kimi": ("kimi_k2", KIMI),
    "functiongemma": ("functiongemma", FUNCTION_GEMMA),
    "lfm2": ("lfm2", LFM2),
    "lfm25": ("lfm2", LFM25),
    "apriel": ("hunyuan_a13b", APRIEL),
    "seed": ("seed_oss", SEED),
    "cohere": ("cohere_command3", COHERE),
    "hunyuan": ("hunyuan_a13b", HUNYUAN),
    "nemotron": ("nemotron_json", NEMOTRON),
    "minicpm": ("minicpm5", MINICPM),
    "deepseek_v32": ("deepseek_v32", DSML.replace("WRAPPER", "function_calls")),
    "deepseek_v4": ("deepseek_v4", DSML.replace("WRAPPER", "tool_calls")),
    "minimax_m3": ("minimax_m3", MINIMAX_M3),
    "kimi_k3": ("kimi_k3", KIMI_K3),
    "hy_v3": ("hy_v3", HUNYUAN_V3),
    "apertus": ("apertus", APERTUS),
    "gigachat3": ("gigachat3", GIGACHAT3),
    "solar_open": ("solar_open", SOLAR_OPEN),
    "solar_open2": ("solar_open2", SOLAR_OPEN2),
    "firefunction": ("phi4_mini_json", FIREFUNCTION),
    "muse_glimmer": ("muse_glimmer", MUSE_GLIMMER),
    "mistral4": ("mistral", MISTRAL4),
}
"""Name -> the format of its calls, and the template."""
