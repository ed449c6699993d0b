"""Chat templates in the manner of well-known models: short forms that use the same constructs of Jinja2."""

from __future__ import annotations

from typing import Final

from support import byte_tokenizer, tiny_tokenizer

CHATML: Final = """\
{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}\
{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{% endif %}\
{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

QWEN3: Final = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n\\nFunction signatures within <tools></tools> tags:\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools>\\n\\nAnswer with <tool_call>\\n{\\"name\\": ...}\\n</tool_call><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1, searching=true) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" and not(message.content.startswith('<tool_response>') \
and message.content.endswith('</tool_response>')) %}
        {%- set ns.searching = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or reasoning) %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' \
+ content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if (loop.first and content) or (not loop.first) %}{{- '\\n' }}{%- endif %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {{- '<tool_call>\\n{"name": "' }}{{- call.name }}{{- '", "arguments": ' }}
            {%- if call.arguments is string %}{{- call.arguments }}{%- else %}{{- call.arguments | tojson }}{%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' }}{{- content }}{{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

LLAMA31: Final = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{- "Environment: ipython\\n" }}{%- endif %}
{{- "Today Date: 26 Jul 2024\\n\\n" }}
{%- if tools %}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{%- endif %}
{{- system_message }}{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' \
+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}{{- raise_exception("one tool call at a time") }}{%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- '{"name": "' + tool_call.name + '", ' }}{{- '"parameters": ' }}{{- tool_call.arguments | tojson }}{{- "}" }}
        {{- "<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is not string %}
            {{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

MISTRAL: Final = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set loop_messages = messages %}{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}{{- '"' + key + '": "' + val + '"' }}
                    {%- else %}{{- '"' + key + '": ' + val|tojson }}{%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
                {{- "}}" }}{%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" }}{%- endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}{{- "[INST] " + message["content"] + "[/INST]" }}{%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}
            {{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id|length != 9 %}
                {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
            {%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}
            {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}{{- " " + message["content"]|trim + eos_token}}
    {%- elif message["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content|string + ", " }}
        {{- '"call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}{{- raise_exception("unknown role") }}{%- endif %}
{%- endfor %}"""

GEMMA: Final = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}{%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}{%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- if (message['role'] == 'assistant') -%}{%- set role = "model" -%}
    {%- else -%}{%- set role = message['role'] -%}{%- endif -%}
    {{ '<start_of_turn>' + role + '\\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}{{ item['text'] | trim }}{%- endfor -%}
    {%- else -%}{{ raise_exception("Invalid content type") }}{%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{'<start_of_turn>model\\n'}}{%- endif -%}"""

GEMMA4: Final = """\
{%- macro written(value) -%}
    {%- if value is string -%}{{- '<|"|>' + value + '<|"|>' -}}
    {%- elif value is boolean -%}{{- 'true' if value else 'false' -}}
    {%- elif value is mapping -%}
        {{- '{' -}}
        {%- for key, item in value | dictsort -%}
            {{- ',' if not loop.first -}}{{- key -}}:{{- written(item) -}}
        {%- endfor -%}
        {{- '}' -}}
    {%- elif value is sequence -%}
        [{%- for item in value -%}{{- written(item) -}}{{- ',' if not loop.last -}}{%- endfor -%}]
    {%- else -%}{{- value -}}{%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(answered=false) -%}
{{- bos_token -}}
{%- set loop_messages = messages -%}
{%- if tools or enable_thinking or messages[0]['role'] in ['system', 'developer'] -%}
    {{- '<|turn>system\\n' -}}
    {%- if enable_thinking is defined and enable_thinking -%}{{- '<|think|>\\n' -}}{%- endif -%}
    {%- if messages[0]['role'] in ['system', 'developer'] -%}
        {{- messages[0]['content'] | trim -}}
        {%- set loop_messages = messages[1:] -%}
    {%- endif -%}
    {%- for tool in tools or [] -%}
        {{- '<|tool>declaration:' + tool['function']['name'] -}}
        {{- written(tool['function']) | trim -}}{{- '<tool|>' -}}
    {%- endfor -%}
    {{- '<turn|>\\n' -}}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if message['role'] == 'tool' -%}
        {{- '<|tool_response>response:' + (message.get('name') or 'unknown') + '{value:' -}}
        {{- written(message['content']) -}}{{- '}<tool_response|>' -}}
    {%- else -%}
        {{- '<|turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\\n' -}}
        {%- set thoughts = message.get('reasoning') or message.get('reasoning_content') -%}
        {%- if thoughts and message.get('tool_calls') -%}
            {{- '<|channel>thought\\n' + thoughts + '\\n<channel|>' -}}
        {%- endif -%}
        {%- for call in message['tool_calls'] or [] -%}
            {{- '<|tool_call>call:' + call['function']['name'] + '{' -}}
            {%- for key, value in call['function']['arguments'] | dictsort -%}
                {{- ',' if not loop.first -}}{{- key -}}:{{- written(value) -}}
            {%- endfor -%}
            {{- '}<tool_call|>' -}}
        {%- endfor -%}
        {{- message['content'] | trim -}}{{- '<turn|>\\n' if not message['tool_calls'] -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|turn>model\\n' -}}{%- endif -%}"""

PHI3: Final = """\
{% for message in messages %}{% if message['role'] in ['system', 'user', 'assistant', 'tool'] %}\
{{'<|' + message['role'] + '|>' + '\\n' + message['content'] + '<|end|>' + '\\n'}}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""

HERMES: Final = """\
{%- macro json_to_python_type(spec) %}
{%- set types = {"string": "str", "number": "float", "integer": "int", "boolean": "bool"} %}
{%- if spec.type in types %}{{- types[spec.type] }}{%- elif spec.type == "array" -%}
{{- "list[" + json_to_python_type(spec|items) + "]"}}{%- else %}{{- "Any" }}{%- endif %}
{%- endmacro %}
{{- bos_token }}{{- '<|im_start|>system\\n' }}
{%- if tools %}{{- "<tools> " }}
{%- for tool in tools %}
    {%- if tool.function is defined %}{%- set tool = tool.function %}{%- endif %}
    {{- '{"type": "function", "function": {"name": "' + tool.name + '", "description": "' + tool.name + '(' }}
    {%- for name, fields in (tool.parameters.properties or {})|items %}
        {{- name + ": " + json_to_python_type(fields) }}{%- if not loop.last %}{{- ", " }}{%- endif %}
    {%- endfor %}
    {{- ') - ' + (tool.description or '') + '", "parameters": ' }}
    {%- if tool.parameters.properties | length == 0 %}{{- "{}" }}{%- else %}{{- tool.parameters|tojson }}{%- endif %}
    {{- "}" }}{%- if not loop.last %}{{- "\\n" }}{%- endif %}
{%- endfor %}{{- " </tools>\\n<tool_call>\\n{}\\n</tool_call>" }}{%- endif %}{{- '<|im_end|>\\n' }}
{%- for message in messages %}
    {%- if message.role == "user" or message.role == "system" \
or (message.role == "assistant" and message.tool_calls is not defined) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- for tool_call in message.tool_calls %}
            {{- '\\n<tool_call>\\n' }}{%- set tool_call = tool_call.function %}
            {{- '{' }}{{- '"name": "' }}{{- tool_call.name }}{{- '"' }}
            {{- ', "arguments": ' }}{{- tool_call.arguments|tojson }}
            {{- '}' }}{{- '\\n</tool_call>' }}
        {%- endfor %}{{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.previtem and loop.previtem.role != "tool" %}{{- '<|im_start|>tool\\n' }}{%- endif %}
        {{- '<tool_response>\\n' }}{{- message.content }}
        {%- if not loop.last %}{{- '\\n</tool_response>\\n' }}{%- else %}{{- '\\n</tool_response>' }}{%- endif %}
        {%- if not loop.last and loop.nextitem.role != "tool" %}{{- '<|im_end|>' }}
        {%- elif loop.last %}{{- '<|im_end|>' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

GRANITE3: Final = """\
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] %}{%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set system_message = "You are Granite." %}{%- set loop_messages = messages %}
    {%- if tools %}{%- set system_message = system_message + " Call tools with <|tool_call|>[...]." %}{%- endif %}
{%- endif %}
{{- '<|start_of_role|>system<|end_of_role|>' + system_message + '<|end_of_text|>\\n' }}
{%- if tools %}
    {{- '<|start_of_role|>tools<|end_of_role|>' }}{{- tools | tojson(indent=4) }}{{- '<|end_of_text|>\\n' }}
{%- endif %}
{%- for message in loop_messages %}
    {{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + message['content'] + '<|end_of_text|>\\n' }}
    {%- if loop.last and add_generation_prompt %}{{- '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}
{%- endfor %}"""

PHI4_MINI: Final = """\
{% for message in messages %}\
{% if message['role'] == 'system' and 'tools' in message and message['tools'] is not none %}\
{{ '<|' + message['role'] + '|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' + '<|end|>' }}\
{% else %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"""

SMOLLM3: Final = """\
{%- if enable_thinking is not defined -%}{%- set enable_thinking = true -%}{%- endif -%}
{{- "<|im_start|>system\\n" -}}
{%- if messages[0].role == "system" -%}{{- messages[0].content.replace("/no_think", "").rstrip() -}}{%- endif -%}
{%- if xml_tools -%}
    {{- "\\n\\n### Tools\\n<tools>\\n" -}}
    {%- for tool in xml_tools -%}{{- tool | string ~ "\\n" -}}{%- endfor -%}
    {{- "</tools>\\nAnswer with <tool_call>{}</tool_call>" -}}
{%- endif -%}
{{- "<|im_end|>\\n" -}}
{%- for message in messages -%}
    {%- set content = message.content if message.content is string else "" -%}
    {%- if message.role == "user" -%}
        {{ "<|im_start|>" + message.role + "\\n"  + content + "<|im_end|>\\n" }}
    {%- elif message.role == "assistant" -%}
        {{ "<|im_start|>assistant\\n" + ("" if enable_thinking else "<think>\\n\\n</think>\\n") \
+ content.lstrip("\\n") + "<|im_end|>\\n" }}
    {%- elif message.role == "tool" -%}
        {{ "<|im_start|>" + "user\\n" + content + "<|im_end|>\\n" }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ "<|im_start|>assistant\\n" + ("" if enable_thinking else "<think>\\n\\n</think>\\n") }}
{%- endif -%}"""

OLMO3: Final = """\
{%- if messages[0].role != 'system' -%}
    {{- '<|im_start|>system\\nYou are a helpful AI assistant. ' -}}
    {%- if tools -%}{{- '<functions>' + (tools | tojson) + '</functions>' -}}{%- endif -%}
    {{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message['role'] == 'system' -%}
        {{- '<|im_start|>system\\n' + message['content'] -}}
        {%- if tools -%}{{- ' <functions>' + (tools | tojson) + '</functions>' -}}{%- endif -%}
        {{- '<|im_end|>\\n' -}}
    {%- elif message['role'] == 'user' -%}{{- '<|im_start|>user\\n' + message['content'] + '<|im_end|>\\n' -}}
    {%- elif message['role'] == 'assistant' -%}
        {{- '<|im_start|>assistant\\n' -}}
        {%- if message.get('content', none) is not none -%}{{- message['content'] -}}{%- endif -%}
        {%- if message.get('tool_calls', none) is not none -%}
            {{- '<function_calls>' -}}
            {%- for call in message['tool_calls'] -%}
                {{- call['function']['name'] + '(' -}}
                {%- for name, value in call['function']['arguments'].items() -%}
                    {{- name + '=' + (value | tojson) -}}{%- if not loop.last -%}{{- ', ' -}}{%- endif -%}
                {%- endfor -%}
                {{- ')' -}}{%- if not loop.last -%}{{- '\\n' -}}{%- endif -%}
            {%- endfor -%}
            {{- '</function_calls>' -}}
        {%- endif -%}
        {{- '<|im_end|>\\n' -}}
    {%- elif message['role'] == 'tool' -%}
        {{- '<|im_start|>environment\\n' + message['content'] + '<|im_end|>\\n' -}}
    {%- endif -%}
    {%- if loop.last and add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
{%- endfor -%}"""

GPT_OSS: Final = """\
{{- "<|start|>system<|message|>You are ChatGPT.\\n\\nReasoning: " + (reasoning_effort or "medium") + "<|end|>" }}
{%- if messages[0].role == "system" %}
    {%- set developer = messages[0].content %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set developer = "" %}{%- set loop_messages = messages %}{%- endif %}
{%- if developer or tools %}
    {{- "<|start|>developer<|message|>" + developer }}
    {%- if tools %}
        {{- "\\n\\n# Tools\\n\\nnamespace functions {\\n" }}
        {%- for tool in tools %}{{- "type " + tool.function.name + " = () => any;\\n" }}{%- endfor %}
        {{- "} // namespace functions" }}
    {%- endif %}
    {{- "<|end|>" }}
{%- endif %}
{%- set last_tool_call = namespace(name=none) %}
{%- for message in loop_messages %}
    {%- if message.role == 'assistant' and "tool_calls" in message %}
        {%- set call = message.tool_calls[0].function %}
        {%- if message.thinking %}
            {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}
        {%- endif %}
        {{- "<|start|>assistant to=" }}{{- "functions." + call.name + "<|channel|>commentary json<|message|>" }}
        {{- call.arguments|tojson }}{{- "<|call|>" }}
        {%- set last_tool_call.name = call.name %}
    {%- elif message.role == 'assistant' %}
        {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
    {%- elif message.role == 'tool' %}
        {%- if last_tool_call.name is none %}{{- raise_exception("no tool call before this result") }}{%- endif %}
        {{- "<|start|>functions." + last_tool_call.name }}
        {{- " to=assistant<|channel|>commentary<|message|>" + message.content|tojson + "<|end|>" }}
    {%- else %}{{- "<|start|>user<|message|>" + message.content + "<|end|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|start|>assistant" }}{%- endif %}"""

ERNIE45: Final = """\
{%- if not add_generation_prompt is defined -%}{%- set add_generation_prompt = true -%}{%- endif -%}
{%- if not cls_token is defined -%}{%- set cls_token = "<s>" -%}{%- endif -%}
{{- cls_token -}}
{%- for message in messages -%}
    {%- if message["role"] == "user" -%}{{- "User: " + message["content"] + "\\n" -}}
    {%- elif message["role"] == "assistant" -%}{{- "Assistant: " + message["content"] + eos_token -}}
    {%- elif message["role"] == "system" -%}{{- message["content"] + "\\n" -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "Assistant: " -}}{%- endif -%}"""

EXAONE4: Final = """\
{%- set end_of_turn = '<|end|>\\n' %}
{%- set role_indicators = {'user': '[|user|]\\n', 'assistant': '[|assistant|]\\n', 'system': '[|system|]\\n'} %}
{%- for i in range(messages | length) %}
    {%- set msg = messages[i] %}
    {%- if msg.role not in role_indicators %}{{- raise_exception('Unknown role: ' ~ msg.role) }}{%- endif %}
    {%- set content = msg.content %}
    {%- if msg.role == 'assistant' and '</think>' in content %}
        {%- set content = content.split('</think>')[-1].strip() %}
    {%- endif %}
    {{- role_indicators[msg.role] ~ content ~ end_of_turn }}
{%- endfor %}
{%- if add_generation_prompt %}{{- role_indicators['assistant'] }}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"""

DEEPSEEK: Final = """\
{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}\
{% set ns = namespace(is_first=false, system_prompt='') %}\
{%- for message in messages %}{%- if message['role'] == 'system' %}{% set ns.system_prompt = message['content'] %}\
{%- endif %}\
{%- endfor %}{{bos_token}}{{ns.system_prompt}}\
{%- for message in messages %}\
{%- if message['role'] == 'user' %}{{'<|user|>' + message['content']}}{%- endif %}\
{%- if message['role'] == 'assistant' %}{% set content = message['content'] %}\
{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}\
{{'<|assistant|>' ~ content ~ '<|end|>'}}{%- endif %}\
{%- endfor -%}{% if add_generation_prompt %}{{'<|assistant|><think>\\n'}}{% endif %}"""

OPERATIONS: Final = """\
{%- set ns = namespace(text='') -%}
{%- for m in messages -%}
  {%- set ns.text = ns.text ~ '<|%s|>' % m.role ~ '{}'.format(m.content) | replace('~', '<|im_end|>') -%}
{%- endfor -%}
{%- set parts = ns.text.split('\\n') -%}
{%- filter trim %}{{ ['<|im_start|>', parts | join('\\n')] | join }}{% endfilter -%}
{{- ('<|end|>' * 2)[:7] }}{{ ' <|END|>'.lower().strip() }}"""

TEMPLATES: Final[dict[str, str]] = {
    "chatml": CHATML,
    "qwen3": QWEN3,
    "llama31": LLAMA31,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "gemma4": GEMMA4,
    "phi3": PHI3,
    "hermes": HERMES,
    "granite3": GRANITE3,
    "phi4_mini": PHI4_MINI,
    "smollm3": SMOLLM3,
    "olmo3": OLMO3,
    "gpt_oss": GPT_OSS,
    "ernie4_5": ERNIE45,
    "exaone4": EXAONE4,
    "deepseek": DEEPSEEK,
    "operations": OPERATIONS,
    "tiny": tiny_tokenizer.TEMPLATE,
    "bytes": byte_tokenizer.TEMPLATE,
}
SPLITTING: Final = frozenset({"qwen3", "exaone4", "deepseek", "operations"})
"""They treat content differently that spells some text."""
