"""Request bodies for the tests of the API, each of which is sent with and without streaming."""

from __future__ import annotations

from typing import Any, Final

Row = dict[str, Any]

OK_SCHEMA: Final[Row] = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 2]}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}
STRUCTURED: Final[list[Row]] = [
    {"json": OK_SCHEMA},
    {"json": '{"type": "boolean"}'},
    {"regex": "[a-c]{2,4}"},
    {"choice": ["yes", "no"]},
    {"grammar": 'start: "a" /[0-9]/ "z"'},
    {"json_object": True},
    {"json": OK_SCHEMA, "disable_any_whitespace": True},
]
SAMPLING: Final[list[Row]] = [
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0.7, "top_p": 0.5},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.0, "min_p": 0.1},
    {"presence_penalty": 1.5, "frequency_penalty": -0.5},
    {"repetition_penalty": 1.3},
    {"logit_bias": {"70": 50, "71": -100}},
    {"min_tokens": 3},
    {"ignore_eos": True},
    {"stop_token_ids": list(range(4, 200))},
    {"bad_words": ["e", "th"]},
    {"allowed_token_ids": [70, 71, 72]},
    {"truncate_prompt_tokens": 3},
    {"skip_special_tokens": False},
    {"stop": "e"},
    {"stop": ["a", "b", "th"], "include_stop_str_in_output": True},
    {"n": 3, "temperature": 1.0},
    {"return_token_ids": True},
    {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "use_beam_search": False},
    {"safety_identifier": "x", "prompt_cache_key": "y", "prompt_cache_retention": "in_memory"},
    {"timings": True},
    {"timeout": 60, "cache_salt": "pepper", "priority": 0, "slo": {"ttft_ms": 500, "tpot_ms": 50}},
    {"response_format": {"type": "text"}},
    {"response_format": {"type": "json_object"}, "max_tokens": 12},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": OK_SCHEMA, "strict": True}}},
    *[{"structured_outputs": constraint, "max_tokens": 24} for constraint in STRUCTURED],
]

COMPLETIONS: Final[list[Row]] = [
    {},
    {"prompt": [10, 20, 30]},
    {"prompt": ["one", "two"]},
    {"prompt": [[10, 20], [30, 40, 50]], "n": 2},
    {"logprobs": 0},
    {"logprobs": 3},
    {"logprobs": 2, "return_tokens_as_token_ids": True},
    {"echo": True},
    {"echo": True, "logprobs": 1, "n": 2},
    {"echo": True, "logprobs": 2, "max_tokens": 0},
    {"echo": True, "prompt": [10, 20, 30]},
    {"add_special_tokens": False},
    {"suffix": None, "best_of": 2, "n": 2, "logits_processors": []},
    *SAMPLING,
]

MESSAGES: Final = [{"role": "user", "content": "Hello"}]
WEATHER: Final[Row] = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "unit": {"$ref": "#/$defs/unit"}},
    "required": ["city", "unit"],
    "additionalProperties": False,
    "$defs": {"unit": {"enum": ["C", "F"]}},
}
TOOLS: Final = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "add", "parameters": OK_SCHEMA}},
]
NAMED: Final = {"type": "function", "function": {"name": "get_weather"}}
CALL_REGEX: Final = r'Well\. <tool_call>\{"name": "add", "arguments": \{"n": [0-9]\}\}</tool_call>'
HISTORY: Final = [
    *MESSAGES,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"n": 1}'}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
]

CHATS: Final[list[Row]] = [
    {},
    {"messages": [{"role": "developer", "content": "Be brief."}, *MESSAGES]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": "ann"}]},
    {"messages": HISTORY},
    {"messages": HISTORY, "tools": TOOLS},
    {"max_completion_tokens": 4},
    {"logprobs": True},
    {"logprobs": True, "top_logprobs": 3},
    {"tools": TOOLS},
    {"tools": TOOLS, "tool_choice": "none"},
    {"tools": TOOLS, "tool_choice": "auto", "structured_outputs": {"regex": CALL_REGEX}, "max_tokens": 90},
    {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 90},
    {"tools": TOOLS, "tool_choice": "required", "max_tokens": 30},
    {"tools": TOOLS, "tool_choice": NAMED, "max_tokens": 60},
    {"tools": TOOLS, "tool_choice": NAMED, "n": 2, "temperature": 1.0, "max_tokens": 60},
    {"tools": TOOLS, "tool_choice": NAMED, "logprobs": True, "max_tokens": 60},
    {
        "tools": TOOLS,
        "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}},
        "parallel_tool_calls": False,
        "max_tokens": 90,
    },
    {"chat_template_kwargs": {"enable_thinking": True}},
    {"chat_template_kwargs": {"enable_thinking": True}, "include_reasoning": False},
    {"reasoning_effort": "low"},
    {"documents": [{"title": "t", "text": "d"}]},
    {"add_generation_prompt": False},
    {
        "messages": [*MESSAGES, {"role": "assistant", "content": "Once"}],
        "continue_final_message": True,
        "add_generation_prompt": False,
        "echo": True,
    },
    {"modalities": ["text"], "verbosity": "medium", "functions": [], "function_call": "none", "audio": None},
    {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
    *SAMPLING,
]

FLAT_TOOLS: Final = [{"type": "function", "strict": False, **tool["function"]} for tool in TOOLS]  # type: ignore[dict-item]
RESPONSES: Final[list[Row]] = [
    {},
    {"instructions": "Be brief.", "metadata": {"a": "b"}, "user": "me", "store": False},
    {"input": [{"role": "user", "content": "Hi"}]},
    {"input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}]},
    {
        "input": [
            {"role": "user", "content": "Hi"},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
            {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "add", "arguments": '{"n": 1}'},
            {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        ],
        "tools": FLAT_TOOLS,
    },
    {"text": {"format": {"type": "json_schema", "name": "x", "schema": OK_SCHEMA}}, "max_output_tokens": 40},
    {"text": {"format": {"type": "json_object"}}},
    {"text": {"format": {"type": "text"}, "verbosity": "medium"}},
    {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
    {"include": ["reasoning.encrypted_content"], "reasoning": {"effort": "low"}},
    {"tools": FLAT_TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 90},
    {"tools": FLAT_TOOLS, "tool_choice": {"type": "function", "name": "add"}, "max_output_tokens": 60},
    {"tools": FLAT_TOOLS, "structured_outputs": {"regex": CALL_REGEX}, "max_output_tokens": 90},
    {"chat_template_kwargs": {"enable_thinking": True}},
    {"structured_outputs": {"choice": ["yes", "no"]}, "truncation": "disabled", "background": False},
    {"temperature": 1.0, "top_p": 0.9, "seed": 3, "stop": "e", "timings": True},
]
