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
}
"""Name -> the format of its calls, and the template."""
