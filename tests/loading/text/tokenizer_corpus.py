"""A thousand difficult strings for tokenizers: scripts, emoji, code, white space, numbers, spellings of tokens."""

from __future__ import annotations

import random

SCRIPTS = [
    "The quick brown fox jumps over the lazy dog, and it's the dog's problem; we'll see.",
    "Ça alors ! L'été, où êtes-vous ? Naïve façade, œuvre d'art à 50 €.",
    "Grüße aus Köln: Straße, Fußgängerübergänge, ÄÖÜäöüß.",
    "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία.",
    "עטלף אבק נס דרך מזגן שהתפוצץ כי חם.",
    "نص حكيم له سر قاطع وذو شأن عظيم مكتوب على ثوب أخضر.",
    "ऋषियों को सताने वाले दुष्ट राक्षसों के राजा रावण का सर्वनाश।",
    "いろはにほへと ちりぬるを カタカナ漢字まじり、テスト。",
    "天地玄黃,宇宙洪荒。日月盈昃,辰宿列張。",
    "다람쥐 헌 쳇바퀴에 타고파. 키스의 고유조건은",
    "เป็นมนุษย์สุดประเสริฐเลิศคุณค่า",
    "Tiếng Việt: Nếu bạn đang đọc, xin chào! Ðường phố Hà Nội.",
    "ქართული ენა და դdelays Հայերեն լեզու",
    "Þjáningin er það sem við leitum að; Łódź, Škoda, żółć, İstanbul ığdır.",
    "e\u0301 vs \u00e9, A\u030a vs \u00c5, \u1e9b\u0323, \u212b, \ufb01ligature, \u017f long s, It\u2019s",
]
SYMBOLS = [
    "🎿🚡⛷️ 👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇨🇭🇯🇵 ☃️",
    "∀x∈ℝ: ⌈x⌉ = −⌊−x⌋, α ∧ ¬β ≠ ∅ → ∞ ± √2 × ½ ¼ ² ³ Ⅳ ① ٣ ४",
    "→ ⇒ ↔ ─│┌┐ ░▒▓ « » „“ ”‘’ … – — • § ¶ † ‡ ‰",
    "\u200bzero\u200bwidth\u200d \ufeffbom \u00adsoft \u2028line \u2029par "
    "\u0085nel \u00a0nbsp \u3000wide \u202ertl\u202c",
    "\x00\x01\x07\x08\x1b[31m\x7f control \x0b\x0c\r",
    "\U000e0041\U0001f9ff\U00010348\U0001d54f\ue000\ufffd",
]
CODE = [
    'def f(x: int) -> str:\n    return f"{x!r:>{10}}"  # comment\n\n\nclass A(B):\n\tpass\n',
    "for (int i = 0; i < n; ++i) { a[i] += b[i] << 2; }\r\n// done\r\n",
    "SELECT * FROM t WHERE a='it''s' AND b>=3.14e-10;",
    '<div class="x">&nbsp;</div><!-- c --><script>if(a&&b||!c){}</script>',
    '{"k": [1, 2.5, null, true], "s": "\\u00e9\\n"}',
    "$ grep -rn 'foo.*bar' ./src | awk '{print $1}' > /dev/null 2>&1",
    "https://example.org/a/b?c=d&e=%20f#g user.name+tag@example.co.uk",
    "\\frac{\\partial u}{\\partial t} = \\nabla^2 u \\quad \\text{on } \\Omega",
    "a==b!=c<=d>=e&&f||g??h?.i::j->k=>l...m<<n>>o**p//q",
]
SPECIALS = [
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "<|endoftext|>",
    " <|im_end|> ",
    "<|im_end|><|im_end|>x",
    "<|im_start|",
    "<|im_end >",
    "< |im_end|>",
    "<repo_name>a/b<file_sep>c.py",
    "<s>[INST] hi [/INST]</s>",
    "<|begin_of_text|><|eot_id|><|start_header_id|>",
    "<unk><pad><mask>[MASK][CLS]",
    "<0x0A><0xff>",
    "▁ĠĊ ▁▁ Ġthe",
]
WHITESPACE = " \t\n\r  \u00a0"
EDGES = [
    "",
    " ",
    "  ",
    "\n",
    "\n\n",
    "\t",
    "\r\n",
    "   \n   ",
    "a",
    " a",
    "a ",
    "  a  b  ",
    "\n a\n\n  b \n",
    "'S",
    "''s",
    "'",
]


def _number(rng: random.Random) -> str:
    value = rng.randrange(10 ** rng.randrange(1, 20))
    return rng.choice([f"{value}", f"{value:,}", f"{value / 1000:.3f}", f"-{value}%", f"0x{value:x}", f"v{value}.0"])


def _whitespace(rng: random.Random) -> str:
    return "".join(rng.choice(WHITESPACE) for _ in range(rng.randrange(1, 12)))


def _slice(rng: random.Random, texts: list[str]) -> str:
    text = rng.choice(texts)
    start = rng.randrange(len(text))
    return text[start : start + rng.randrange(1, 40)]


def _random_characters(rng: random.Random) -> str:
    planes = [(0x20, 0x7F), (0xA0, 0x250), (0x370, 0x600), (0x900, 0xE00), (0x3040, 0x3100), (0x4E00, 0x9FFF)]
    return "".join(chr(rng.randrange(*rng.choice([*planes, (0x1F300, 0x1F700)]))) for _ in range(rng.randrange(1, 12)))


def strings(count: int = 1000) -> list[str]:
    """Return the first `count` strings, which are the same in every run."""
    rng = random.Random(20231)
    fixed = [*EDGES, *SCRIPTS, *SYMBOLS, *CODE, *SPECIALS]
    parts = [
        lambda: _slice(rng, SCRIPTS),
        lambda: _slice(rng, SYMBOLS),
        lambda: _slice(rng, CODE),
        lambda: rng.choice(SPECIALS),
        lambda: _number(rng),
        lambda: _whitespace(rng),
        lambda: _random_characters(rng),
    ]
    made = ["".join(rng.choice(parts)() for _ in range(rng.randrange(1, 7))) for _ in range(count)]
    return (fixed + made)[:count]
