"""Valid answers of models in every format of calls and reasoning, with the right reading of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

Calls = Sequence[tuple[str, dict[str, Any]]]


class Answer(NamedTuple):
    """An answer: the format of its calls, or those of its reasoning and calls joined by "+", its text, and what it
    means. `calls` are pairs of a name and arguments; the content is the whole text if neither is given."""

    form: str
    text: str
    calls: Calls = ()
    content: str | None = None
    reasoning: str = ""


def f(**arguments: Any) -> tuple[str, dict[str, Any]]:
    return "f", arguments


SCHEMA: Final[dict[str, Any]] = {
    "properties": {
        "s": {"type": "string"},
        "n": {"type": "integer"},
        "x": {"type": "number"},
        "b": {"type": "boolean"},
        "l": {"type": "array"},
        "o": {"type": "object"},
        "id": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        "size": {"type": ["number", "string"]},
        "edits": {
            "type": "array",
            "items": {"type": "object", "properties": {"id": {"type": "string"}, "old": {"type": "string"}}},
        },
        "tree": {"$ref": "#/$defs/tree"},
        "maybe": {"type": ["string", "null"]},
    },
    "$defs": {"tree": {"properties": {"name": {"type": "string"}, "tree": {"$ref": "#/$defs/tree"}}}},
}
NAMES: Final = ("f", "get_weather", "mcp:search", "functions-2.list", "g")
"""The declared tools, all with this schema. Arguments that it does not name have no declared type."""

PYTHON_VALUES: Final[list[tuple[str, Any]]] = [
    ("'''a 'b' \"c\"'''", "a 'b' \"c\""),
    ('"""two\nlines"""', "two\nlines"),
    ("''", ""),
    ("''''''", ""),
    (r"r'C:\new'", r"C:\new"),
    (r"R'''a\b'''", "a\\b"),
    ("u'é'", "é"),
    ("f'plain'", "plain"),
    ("'a' 'b' \"c\"", "abc"),
    ("('a'\n 'b')", "ab"),
    (r"'it\'s \x41\u00e9\U0001F600\n'", "it's Aé\U0001f600\n"),
    (r"'\d+\s'", r"\d+\s"),
    ('"\\ud83d\\ude00"', "\U0001f600"),
    ("'a\nb'", "a\nb"),
    ("'# no comment (]'", "# no comment (]"),
    ("0x1F", 31),
    ("0o17", 15),
    ("0b101", 5),
    ("1_000_000", 1000000),
    ("-5", -5),
    ("+5", 5),
    ("1e3", 1000.0),
    (".5", 0.5),
    ("12345678901234567890", 12345678901234567890),
    ("True", True),
    ("null", None),
    ("{'a', 'b'}", ["a", "b"]),
    ("(1, 2)", [1, 2]),
    ("(1,)", [1]),
    ("()", []),
    ("[1, (2, [3, {}]),]", [1, [2, [3, {}]]]),
    ("{1: 'a', 2.5: None, True: [], None: 0}", {"1": "a", "2.5": None, "true": [], "null": 0}),
    ('{"a": false, "b": null, "c": [true]}', {"a": False, "b": None, "c": [True]}),
    ("[1,  # it's one\n 2]", [1, 2]),
]
NO_LITERALS: Final = (
    "1 + 1", "'a' * 3", "'a' + 'b'", "g(x=1)", "datetime.now()", "x", "x.y", "[y for y in z]", "not True", "~1", "--1",
    "f'{x}'", "b'bytes'", "1j", "1e999", "...", "{**x}", "[*x]", "lambda: 1", "1 if x else 2", "{'a': g()}", "[1, x]",
    "{[1]: 2}", "{[]}", "1 < 2", "a[0]", "1 2", "", "nan", "set()", "x := 1", "0x",
)  # fmt: skip

PYTHONIC: Final = {
    "pythonic": "[%s]",
    "olmo3": "<function_calls>\n%s\n</function_calls>",
    "lfm2": "<|tool_call_start|>[%s]<|tool_call_end|>",
}
PYTHON: Final = [
    Answer(form, shape % f"f(v={text}, w=1)", [f(v=value, w=1)])
    for form, shape in PYTHONIC.items()
    for text, value in PYTHON_VALUES
] + [Answer(form, shape % f"f(a=1, v={text})") for form, shape in PYTHONIC.items() for text in NO_LITERALS]

WEATHER: Final = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
PARIS: Final = ("get_weather", {"city": "Paris"})
START_TEXT: Final = ("<|START_TEXT|>", "<|END_TEXT|>")
START_RESPONSE: Final = ("<|START_RESPONSE|>", "<|END_RESPONSE|>")
ACTION: Final = '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {"n": 1}}]<|END_ACTION|>'
STEPS: Final = "Here are my reasoning steps:"
FINAL: Final = "[BEGIN FINAL RESPONSE]"
KIMI: Final = "<|tool_calls_section_begin|>%s<|tool_calls_section_end|>"
KIMI_CALL: Final = '<|tool_call_begin|>%s<|tool_call_argument_begin|>{"n": 1}<|tool_call_end|>'
CODER: Final = "<tool_call>\n<function=f>\n<parameter=%s>\n%s\n</parameter>\n</function>\n</tool_call>"
SEED: Final = "<seed:tool_call>\n<function=f>\n<parameter=%s>%s</parameter>\n</function>\n</seed:tool_call>"
GLM: Final = "<tool_call>f\n<arg_key>%s</arg_key>\n<arg_value>%s</arg_value>\n</tool_call>"
MINIMAX: Final = (
    '<minimax:tool_call>\n<invoke name="f">\n<parameter name="%s">%s</parameter>\n</invoke>\n</minimax:tool_call>'
)
HUNYUAN: Final = (
    "<tool_calls:opensource>\n<tool_call:opensource>f<tool_sep:opensource>\n<arg_key:opensource>%s</arg_key:opensource>\n"
    "<arg_value:opensource>%s</arg_value:opensource>\n</tool_call:opensource>\n</tool_calls:opensource>"
)
SOLAR: Final = "<|tool_call:start|>f\n<|tool_arg:start|>%s<|tool_arg:value|>%s<|tool_arg:end|>\n<|tool_call:end|>"
ATEM: Final = (
    '<atem:function_calls>\n<atem:invoke name="f">\n<atem:parameter name="%s">%s</atem:parameter>\n</atem:invoke>\n'
    "</atem:function_calls><|eom|>"
)
MINICPM: Final = '<function name="f"><param name="%s">%s</param></function>'
TAGGED: Final = {
    "qwen3_coder": CODER,
    "seed_oss": SEED,
    "glm45": GLM,
    "minimax_m2": MINIMAX,
    "minicpm5": MINICPM,
    "hy_v3": HUNYUAN,
    "solar_open2": SOLAR,
    "muse_glimmer": " to=f<|message|>" + ATEM,
}
TAGGED_VALUES: Final[list[tuple[str, str, Any]]] = [
    ("id", "1e5", "1e5"),
    ("id", "17", 17),
    ("id", "-3", -3),
    ("id", "5.0", "5.0"),
    ("id", "007", "007"),
    ("id", "True", "True"),
    ("size", "1e5", 1e5),
    ("size", "0x10", "0x10"),
    ("maybe", "null", None),
    ("maybe", '"quoted"', '"quoted"'),
    ("s", "'quoted'", "'quoted'"),
    ("s", "5", "5"),
    ("other", '"quoted"', '"quoted"'),
    ("other", "'a' 'b'", "'a' 'b'"),
    ("other", "r'a'", "r'a'"),
    ("other", "0x10", "0x10"),
    ("other", "1_000", "1_000"),
    ("other", "1, 2", "1, 2"),
    ("other", "{a}", "{a}"),
    ("other", "x + 1", "x + 1"),
    ("other", "[1, 'a']", [1, "a"]),
    ("other", '{"a": null}', {"a": None}),
    ("n", "12345678901234567890", 12345678901234567890),
    ("x", "-2.50", -2.5),
    ("b", "False", False),
    ("l", "['a', None]", ["a", None]),
    ("o", '{"a": {"b": 1e3}}', {"a": {"b": 1000.0}}),
]
TAGS: Final = [
    Answer(form, shape % (key, text), [f(**{key: value})])
    for form, shape in TAGGED.items()
    for key, text, value in TAGGED_VALUES
    if "<" not in text
]

M3: Final = "]<]minimax[>["
M3_CALL: Final = f'{M3}<tool_call>\n{M3}<invoke name="f">\n%s{M3}</invoke>\n{M3}</tool_call>'


def nested(name: str, *parts: str) -> str:
    return f"{M3}<{name}>{''.join(parts)}{M3}</{name}>"


NESTED: Final = [
    Answer("minimax_m3", M3_CALL % nested(key, text), [f(**{key: value})]) for key, text, value in TAGGED_VALUES
] + [
    Answer("minimax_m3", M3_CALL % text, [f(**arguments)])
    for text, arguments in (
        ("", {}),
        (nested("s", "") + "\n" + nested("l", "") + "\n" + nested("o", "") + "\n", {"s": "", "l": [], "o": {}}),
        (nested("l", nested("item", "1"), nested("item", "a b")), {"l": [1, "a b"]}),
        (
            nested("l", nested("item", nested("item", "2.5")), nested("item", nested("k", "v"))),
            {"l": [[2.5], {"k": "v"}]},
        ),
        (nested("o", nested("o", nested("o", "x")), nested("b", " y\n")), {"o": {"o": {"o": "x"}, "b": " y\n"}}),
        (nested("o", nested("item", "1")), {"o": {"item": 1}}),
        (nested("o", nested("a", "1"), nested("a", "2")), {"o": {"a": [1, 2]}}),
        (
            nested("edits", "\n", nested("item", nested("id", "007"), nested("old", "5")), "\n"),
            {"edits": [{"id": "007", "old": "5"}]},
        ),
        (
            nested("tree", nested("name", "1"), nested("tree", nested("name", "2"))),
            {"tree": {"name": "1", "tree": {"name": "2"}}},
        ),
        (nested("s", "</s> <item>"), {"s": "</s> <item>"}),
    )
]

TYPED_VALUES: Final[list[tuple[str, str, str, Any]]] = [
    ("id", "17", "string", "17"),
    ("id", "17", "number", 17),
    ("other", "5", "string", "5"),
    ("other", "5", "number", 5),
    ("other", "true", "string", "true"),
    ("other", "true", "boolean", True),
    ("other", "null", "null", None),
    ("other", "007", "string", "007"),
    ("other", '[1, "a"]', "array", [1, "a"]),
    ("other", '[1, "a"]', "string", '[1, "a"]'),
    ("other", '{"a": {"b": null}}', "object", {"a": {"b": None}}),
    ("other", " a\n<b> ", "string", " a\n<b> "),
    ("other", "a b", "object", "a b"),
    ("s", "5", "number", "5"),
    ("n", "5", "string", 5),
    ("maybe", "null", "string", "null"),
    ("maybe", "null", "null", None),
    ("other", "", "string", ""),
]
DSML: Final = (
    '<｜DSML｜%s>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="%s" string="%s">%s</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜%s>"
)
XTML: Final = (
    '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>argument key="%s" type="%s"<|sep|>%s'
    "<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>"
)
DSML_WRAPPERS: Final = {"deepseek_v32": "function_calls", "deepseek_v4": "tool_calls"}
TYPED: Final = [
    Answer(form, DSML % (wrapper, key, "true" if kind == "string" else "false", text, wrapper), [f(**{key: value})])
    for form, wrapper in DSML_WRAPPERS.items()
    for key, text, kind, value in TYPED_VALUES
] + [Answer("kimi_k3", XTML % (key, kind, text), [f(**{key: value})]) for key, text, kind, value in TYPED_VALUES]

LISTED: Final = {
    "mistral": "[TOOL_CALLS] [%s]",
    "granite": "<|tool_call|>[%s]",
    "phi4_mini_json": "functools[%s]",
    "hunyuan_a13b": "<tool_calls>[%s]</tool_calls>",
    "nemotron_json": "<TOOLCALL>[%s]</TOOLCALL>",
    "lfm2": "<|tool_call_start|>[%s]<|tool_call_end|>",
    "hermes": "<tool_call>%s</tool_call>",
    "llama3_json": "%s",
    "olmo3": "<function_calls>[%s]</function_calls>",
    "pythonic": "```json\n[%s]\n```",
    "qwen3_coder": "<tool_call>\n%s\n</tool_call>",
    "glm45": "<tool_call>%s</tool_call>",
    "apertus": "<|tools_prefix|>[%s]<|tools_suffix|>",
    "solar_open": "<|tool_calls|>%s<|calls|>",
    "gigachat3": "<|message_sep|>\n\nfunction call<|role_sep|>\n%s<|message_sep|>",
    "deepseek_v4": "<｜DSML｜tool_calls>%s</｜DSML｜tool_calls>",
    "minimax_m3": f"{M3}<tool_call>%s{M3}</tool_call>",
    "hy_v3": "<tool_calls:opensource>%s</tool_calls:opensource>",
}
LONG: Final = "word " * 2000
LISTS: Final = [
    answer
    for form, shape in LISTED.items()
    for answer in (
        Answer(form, shape % WEATHER, [PARIS], ""),
        Answer(form, f"{shape % WEATHER}\n\nDone.", [PARIS], "Done."),
        Answer(form, f"{shape % WEATHER} Done.", [PARIS], " Done."),
        Answer(form, shape % f'{{"arguments": {{"s": "{LONG}"}}, "name": "f"}}', [f(s=LONG)], ""),
        Answer(form, shape % '{"name": "f"}'),
    )
    if not (form == "llama3_json" and answer.text.endswith("Done."))
]

THINK: Final = "<|open|>think<|sep|>%s<|close|>think<|sep|>"
RESPONSE: Final = "<|open|>response<|sep|>%s<|close|>response<|sep|>"
SELF: Final = " to=self<|message|>Hm. \n<|eom|><|start|>assistant"
CONTENT: Final = "<|begin|>assistant<|content|>%s<|end|>"
SOLAR_CALL: Final = '<|tool_call:begin|>%s<|tool_call:name|>f<|tool_call:args|>{"n": 1}<|tool_call:end|>'
RECENT: Final = [
    Answer(
        "deepseek_v32",
        "So: " + DSML % ("function_calls", "n", "false", "1", "function_calls") + "\nDone.",
        [f(n=1)],
        "So:\nDone.",
    ),
    Answer(
        "qwen3+deepseek_v4",
        "<think>Hm.</think>\n\n" + DSML % ("tool_calls", "n", "false", "1", "tool_calls"),
        [f(n=1)],
        "",
        "Hm.",
    ),
    Answer(
        "deepseek_v4",
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="g">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
        [("g", {})],
    ),
    Answer(
        "deepseek_v4", '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="unknown">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
    ),
    Answer(
        "deepseek_v4",
        '<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="s" string="true">ab</｜DSML｜parameter>\n',
        [f(s="ab")],
    ),
    Answer("minimax_m3+minimax_m3", "<mm:think>Hm.\n</mm:think>\n" + M3_CALL % nested("n", "1"), [f(n=1)], "", "Hm."),
    Answer("minimax_m3+minimax_m3", "</mm:think>Yes.", [], "Yes."),
    Answer("minimax_m3", M3_CALL % nested("n", "1") + "\nDone.", [f(n=1)], "Done."),
    Answer("minimax_m3", "a ]<] b ]<]minimax[>[ c"),
    Answer(
        "kimi_k3+kimi_k3",
        THINK % "Hm. " + RESPONSE % "" + XTML % ("n", "number", "1") + "<|close|>message<|sep|>",
        [f(n=1)],
        "",
        "Hm. ",
    ),
    Answer("kimi_k3+kimi_k3", THINK % "Hm." + RESPONSE % "Yes." + "<|close|>message<|sep|>", [], "Yes.", "Hm."),
    Answer("kimi_k3+kimi_k3", "Yes.<|close|>response<|sep|>" + XTML % ("s", "string", "a"), [f(s="a")], "Yes."),
    Answer("hy_v3+hy_v3", "<think:opensource>Hm.</think:opensource>" + HUNYUAN % ("n", "1"), [f(n=1)], "", "Hm."),
    Answer(
        "hy_v3",
        "<tool_calls:opensource><tool_call:opensource>f<tool_sep:opensource></tool_call:opensource></tool_calls:opensource>",
        [f()],
    ),
    Answer("hy_v3", HUNYUAN.replace("<tool_sep:opensource>\n", "") % ("s", "a"), [f(s="a")]),
    Answer(
        "apertus",
        'So: <|tools_prefix|>[{"f": {"n": 1}}, {"get_weather": {"city": "Paris"}}]<|tools_suffix|>',
        [f(n=1), PARIS],
        "So:",
    ),
    Answer("apertus", '<|tools_prefix|>[{"f": {}}]<|tools_suffix|>\nDone.', [f()], "Done."),
    Answer("apertus", '<|tools_prefix|>[{"unknown": {}}]<|tools_suffix|>'),
    Answer(
        "apertus+apertus",
        '<|inner_prefix|>Hm. <|inner_suffix|><|tools_prefix|>[{"f": {"n": 1}}]<|tools_suffix|>',
        [f(n=1)],
        "",
        "Hm. ",
    ),
    Answer(
        "apertus+apertus", '<|inner_prefix|>Hm. <|tools_prefix|>[{"f": {"n": 1}}]<|tools_suffix|>', [f(n=1)], "", "Hm. "
    ),
    Answer("apertus+apertus", "<|inner_prefix|>Hm.<|inner_suffix|>Yes.", [], "Yes.", "Hm."),
    Answer(
        "gigachat3", f"So.<|message_sep|>\n\nfunction call<|role_sep|>\n{WEATHER}<|message_sep|>\n\n", [PARIS], "So."
    ),
    Answer("gigachat3", f"<|function_call|>{WEATHER}", [PARIS]),
    Answer("solar_open+solar_open", f"<|think|>Hm.<|end|>{CONTENT % 'Yes.'}", [], "Yes.", "Hm."),
    Answer(
        "solar_open+solar_open",
        f"<|think|>Hm.<|end|>{CONTENT % 'So.'}<|begin|>assistant<|tool_calls|>{SOLAR_CALL % 'a1'}{SOLAR_CALL % 'b2'}"
        "<|calls|>",
        [f(n=1), f(n=1)],
        "So.",
        "Hm.",
    ),
    Answer("solar_open+solar_open", "<|content|>Yes.<|end|>", [], "Yes."),
    Answer("solar_open", f"<|tool_calls|>{SOLAR_CALL % ''}", [f(n=1)]),
    Answer("solar_open2+solar_open2", "<|think:start|>Hm.<|think:end|>" + SOLAR % ("n", "1"), [f(n=1)], "", "Hm."),
    Answer("solar_open2", "<|tool_call:start|>f\n<|tool_call:end|>\nDone.", [f()], "Done."),
    Answer("ernie45+hermes", f"<think>Hm.\n</think>\n\n\n<tool_call>\n{WEATHER}\n</tool_call>\n", [PARIS], "", "Hm."),
    Answer("ernie45+hermes", "<think>Hm.</think>\n\n<response>\nYes.\n</response>\n", [], "Yes.", "Hm."),
    Answer("ernie45+hermes", "<think>Hm.</think>\nYes.", [], "Yes.", "Hm."),
    Answer("muse_glimmer", SELF + " to=f<|message|>" + ATEM % ("n", "1"), [f(n=1)], "", "Hm."),
    Answer(
        "muse_glimmer",
        f"{SELF} to=f<|message|>{ATEM % ('n', '1')}<|start|>assistant to=f<|message|>{ATEM % ('s', '5')}",
        [f(n=1), f(s="5")],
        "",
        "Hm.",
    ),
    Answer(
        "muse_glimmer", SELF + " to=f.f<|message|>" + ATEM.replace('"f"', '"f.f"') % ("n", "1"), [f(n=1)], "", "Hm."
    ),
    Answer("muse_glimmer", SELF + " to=user<|message|>Yes.<|eot|>", [], "Yes.", "Hm."),
    Answer(
        "muse_glimmer",
        SELF + " to=user<|message|>" + ATEM % ("n", "1"),
        [],
        (ATEM % ("n", "1")).removesuffix("<|eom|>"),
        "Hm.",
    ),
    Answer(
        "muse_glimmer", " to=self<|message|>" + ATEM % ("n", "1"), [], "", (ATEM % ("n", "1")).removesuffix("<|eom|>")
    ),
    Answer(
        "muse_glimmer",
        " to=user<|message|>Let me look.<|eom|><|start|>assistant to=f<|message|>" + ATEM % ("n", "1"),
        [f(n=1)],
        "Let me look.",
    ),
    Answer("muse_glimmer", "<|message|>Yes.<|eot|>", [], "Yes."),
    Answer(
        "mistral+mistral",
        '[THINK]Hm.[/THINK]So.[TOOL_CALLS]f[ARGS]{"n": 1}[TOOL_CALLS]g[ARGS]{}',
        [f(n=1), ("g", {})],
        "So.",
        "Hm.",
    ),
]

HARMONY: Final = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>%s<|call|>"
OTHERS: Final = [
    Answer("lfm2", "<|tool_call_start|>[f(content='it's <b>')]<|tool_call_end|>", [f(content="it's <b>")]),
    Answer(
        "lfm2",
        "<|tool_call_start|>[f(a='say 'hi', ok?', b=[1, 'x'], c='it's'), g(d='')]<|tool_call_end|>\nDone.",
        [f(a="say 'hi', ok?", b=[1, "x"], c="it's"), ("g", {"d": ""})],
        "Done.",
    ),
    Answer(
        "lfm2",
        "<|tool_call_start|>[f(a='isn't', b='won't', c={\"k\": \"it's\"})]<|tool_call_end|>",
        [f(a="isn't", b="won't", c={"k": "it's"})],
    ),
    Answer("lfm2", "<|tool_call_start|>[f(a='it's', b=x)]<|tool_call_end|>"),
    Answer("lfm2", "<|tool_call_start|>[f(a='one' and 'two')]<|tool_call_end|>"),
    Answer("lfm2", "<|tool_call_start|>[f(a='\\xg')]<|tool_call_end|>", [f(a="\\xg")]),
    Answer("pythonic", "[f(a='\\xg')]"),
    Answer("lfm2", "So: <|tool_call_start|>[f(n=1)]<|tool_call_end|>Yes.", [f(n=1)], "So:Yes."),
    Answer("pythonic", "[f(a=1), get_weather(city='Paris')]", [f(a=1), PARIS]),
    Answer("pythonic", "[f(a=1), f(a=x)]"),
    Answer("pythonic", "[f(a=1)]\nDone.", [f(a=1)], "Done."),
    Answer("pythonic", "[f(from='a', class_=1, max-results=5)]", [("f", {"from": "a", "class_": 1, "max-results": 5})]),
    Answer(
        "pythonic", "[mcp:search(q='a'), functions-2.list()]", [("mcp:search", {"q": "a"}), ("functions-2.list", {})]
    ),
    Answer("pythonic", "[f(\n  a='x',  # the \"first\n  b=2,\n)]", [f(a="x", b=2)]),
    Answer("pythonic", "[f(a=1, a=2)]"),
    Answer("pythonic", "[f(1)]"),
    Answer("pythonic", "[f(**x)]"),
    Answer("pythonic", "[f(a=[1, 'b"),
    Answer("pythonic", "[unknown(a=1)]"),
    Answer("pythonic", "[1, 2] are numbers"),
    Answer("pythonic", "[f(a=g(b=1))]"),
    Answer("pythonic", "```tool_code\nf(a=1)\n```\nDone.", [f(a=1)], "Done."),
    Answer("olmo3", '<function_calls>\nf(a=1)\nget_weather(city="Paris")\n</function_calls>', [f(a=1), PARIS]),
    Answer("olmo3", "<function_calls>\nf(a=1)  # one\nf(a=2)  # two\n</function_calls>", [f(a=1), f(a=2)]),
    Answer("olmo3", "<function_calls>\nf(a=1)\nf(a=x)\n</function_calls>\nB"),
    Answer("olmo3", "<function_calls>f(a=1), f(a=2)</function_calls>", [f(a=1), f(a=2)]),
    Answer("pythonic", "```tool_code\nf(a=1)\nf(a=2)\n```", [f(a=1), f(a=2)]),
    Answer("olmo3", "<function_calls>f(a='</function_calls>')</function_calls>", [f(a="</function_calls>")]),
    Answer("mistral", '[TOOL_CALLS]f[ARGS]{"n": 1}[TOOL_CALLS]f[ARGS]{}', [f(n=1), f()]),
    Answer("mistral", '[TOOL_CALLS]mcp:search[ARGS]{"n": 1}', [("mcp:search", {"n": 1})]),
    Answer("mistral", f"[TOOL_CALLS] [{WEATHER}, {WEATHER}]", [PARIS, PARIS]),
    Answer("phi4_mini_json", f"<|tool_call|>[{WEATHER}]<|/tool_call|>", [PARIS]),
    Answer("granite", f"<|tool_call|>[{WEATHER},\n{WEATHER}]", [PARIS, PARIS]),
    Answer("granite", f"[{WEATHER}]\nDone.", [PARIS], "Done."),
    Answer("llama3_json", '{"name": "f", "parameters": {"n": 1}}; {"name": "f", "parameters": {}}', [f(n=1), f()]),
    Answer("llama3_json", f'<|python_tag|>{{"name": "f", "parameters": {{"s": "{LONG}"}}}}', [f(s=LONG)]),
    Answer("llama3_json", '{"answer": 42}'),
    Answer(
        "hermes", f"A\n<tool_call>\n{WEATHER}\n</tool_call>\n<tool_call>\n{WEATHER}\n</tool_call>", [PARIS] * 2, "A"
    ),
    Answer("hermes", f"A\n<tool_call>\n{WEATHER}\n</tool_call>\nB", [PARIS], "A\nB"),
    Answer("hermes", "a < b and <tool_call> is a tag"),
    Answer(
        "hermes",
        "<tool_call>" + '{"name": "f", "arguments": {"s": "</tool_call>"}}' + "</tool_call>",
        [f(s="</tool_call>")],
    ),
    Answer("kimi_k2", KIMI % (KIMI_CALL % "functions.f:0"), [f(n=1)]),
    Answer(
        "kimi_k2",
        KIMI % (KIMI_CALL % "functions.mcp:search:0" + KIMI_CALL % "functions.f:1"),
        [("mcp:search", {"n": 1}), f(n=1)],
    ),
    Answer("kimi_k2", KIMI % (KIMI_CALL % "mcp:search:12") + "\nDone.", [("mcp:search", {"n": 1})], "Done."),
    Answer("kimi_k2", KIMI % (KIMI_CALL % "functions.unknown:0")),
    Answer(
        "deepseek_v3",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"n": 1}<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>\n\nB",
        [f(n=1)],
        "B",
    ),
    Answer("gemma4", '<|tool_call>call:f{s:<|"|>it\'s {x}, "y"<|"|>,n:1}<tool_call|>', [f(s='it\'s {x}, "y"', n=1)]),
    Answer(
        "gemma4",
        "<|tool_call>call:mcp:search{n:-1.5e3,b:true,o:{a:[null]}}<tool_call|>\nDone.",
        [("mcp:search", {"n": -1500.0, "b": True, "o": {"a": [None]}})],
        "Done.",
    ),
    Answer(
        "functiongemma",
        "<start_function_call>call:f{s:<escape>a, b}<escape>,n:1}<end_function_call>",
        [f(s="a, b}", n=1)],
    ),
    Answer("cohere_command3", ACTION, [f(n=1)]),
    Answer("openai", HARMONY % '{"n": 1}', [f(n=1)]),
    Answer("openai", HARMONY % "{}", [f()]),
    Answer(
        "openai",
        "<|channel|>analysis<|message|>Hm. \n<|end|><|start|>assistant" + HARMONY % '{"n": 1}',
        [f(n=1)],
        "",
        "Hm.",
    ),
    Answer(
        "openai",
        "<|channel|>analysis<|message|>One. <|end|><|start|>assistant<|channel|>analysis<|message|>Two<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
        [],
        "Yes.",
        "One. Two",
    ),
    Answer(
        "qwen3+hermes",
        f"<think>\nHm. \n\n</think>\n\n<tool_call>\n{WEATHER}\n</tool_call>\nDone.",
        [PARIS],
        "Done.",
        "Hm.",
    ),
    Answer("qwen3+hermes", "<think> Hm.\t</think> Yes.", [], " Yes.", " Hm.\t"),
    Answer("qwen3+qwen3_coder", "<think>\nHm.\n \n</think>\n\n" + CODER % ("n", "5"), [f(n=5)], "", "Hm."),
    Answer("qwen3+glm45", "<think>Hm. </think>\n" + GLM % ("s", "a"), [f(s="a")], "", "Hm. "),
    Answer("deepseek_r1+hermes", "Hm. \n</think>\n\nYes.", [], "Yes.", "Hm."),
    Answer("deepseek_r1+hermes", f"Hm. \n<tool_call>{WEATHER}</tool_call>", [PARIS], "", "Hm."),
    Answer("olmo3+olmo3", "Hm. </think>\n\n<function_calls>\nf(a=0x1F)\n</function_calls>", [f(a=31)], "", "Hm. "),
    Answer("seed_oss+seed_oss", "<seed:think>Hm. \n</seed:think>\n" + SEED % ("n", "1"), [f(n=1)], "", "Hm."),
    Answer("mistral+mistral", f"[THINK]Hm. [/THINK][TOOL_CALLS] [{WEATHER}]\nYes.", [PARIS], "Yes.", "Hm. "),
    Answer(
        "granite+granite",
        f"Here is my thought process: Hm. \n\nHere is my response: <|tool_call|>[{WEATHER}]",
        [PARIS],
        "",
        " Hm.",
    ),
    Answer("granite33+granite", "<think>Hm. </think><response>Yes.</response>", [], "Yes.", "Hm. "),
    Answer(
        "granite33+granite",
        f"<think>Hm.</think><response>\nA\n</response><|tool_call|>[{WEATHER}]",
        [PARIS],
        "A",
        "Hm.",
    ),
    Answer("gemma4+gemma4", "<|channel>thought\nHm. \n<channel|>Yes.", [], "Yes.", "Hm."),
    Answer("gemma4+gemma4", "<|channel>thought\nHm.<channel|><|tool_call>call:f{n:1}<tool_call|>", [f(n=1)], "", "Hm."),
    Answer("hunyuan_a13b+hunyuan_a13b", "<think>\nHm. \n</think>\n<answer>\nYes.\n</answer>", [], "Yes.", "Hm."),
    Answer(
        "hunyuan_a13b+hunyuan_a13b",
        f"<think>Hm.</think>\n<answer><tool_calls>[{WEATHER}]</tool_calls></answer>",
        [PARIS],
        "",
        "Hm.",
    ),
    *(
        answer
        for start, end in (START_TEXT, START_RESPONSE)
        for answer in (
            Answer("cohere_command3+cohere_command3", f"{start}Yes.{end}", [], "Yes."),
            Answer(
                "cohere_command3+cohere_command3",
                f"<|START_THINKING|>Hm. <|END_THINKING|>{start}Yes.{end}",
                [],
                "Yes.",
                "Hm. ",
            ),
            Answer(
                "cohere_command3+cohere_command3",
                f"<|START_THINKING|>Hm.<|END_THINKING|>{start}A{end}{ACTION}",
                [f(n=1)],
                "A",
                "Hm.",
            ),
            Answer(
                "cohere_command3+cohere_command3",
                f"<|START_THINKING|>Hm.<|END_THINKING|>{ACTION}\n{start}A{end}",
                [f(n=1)],
                "A",
                "Hm.",
            ),
            Answer("cohere_command3+cohere_command3", f"{ACTION}{start}A", [f(n=1)], "A"),
            Answer("none+cohere_command3", f"{start}Yes.{end}", [], "Yes."),
        )
    ),
    Answer("apriel+hunyuan_a13b", f"{STEPS}\nHm. \n{FINAL}\nYes.", [], "Yes.", "Hm."),
    Answer("apriel+hunyuan_a13b", f"{STEPS}\nHm.\n\n{FINAL}\nYes.\n[END FINAL RESPONSE]\n", [], "Yes.", "Hm."),
    Answer("apriel+hunyuan_a13b", f"{STEPS}\nHm.\n{FINAL}\n\n<tool_calls>[{WEATHER}]</tool_calls>", [PARIS], "", "Hm."),
    Answer("apriel+hunyuan_a13b", f"{STEPS}\nHm.\n<tool_calls>[{WEATHER}]</tool_calls>", [PARIS], "", "Hm."),
]

CORPUS: Final = [*PYTHON, *TAGS, *NESTED, *TYPED, *LISTS, *RECENT, *OTHERS]
