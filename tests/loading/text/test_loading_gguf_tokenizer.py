"""Tokenizers from GGUF metadata equal llama.cpp and transformers, round-trip texts, and are cached."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_corpus import strings
from tokenizers import Regex, pre_tokenizers
from transformers import AutoTokenizer, GemmaTokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.tokenization_utils_base import generate_merges

from chairlift.errors import ModelLoadError
from chairlift.loading.cache import CACHE_VARIABLE, write_atomically
from chairlift.loading.gguf_file import GGUFFile
from chairlift.loading.model_source import GGUFSource
from chairlift.loading.text import gguf_tokenizer
from chairlift.loading.text.gguf_tokenizer import PRE_TOKENIZERS
from chairlift.loading.text.tokenizer import Tokenizer
from support.gguf_files import files_read_once, write_tokenizer_gguf

SAMPLE = Path(__file__).parents[2] / "data" / "smollm2_llama_cpp_ids.json"
SPLITS = json.loads(SAMPLE.with_name("gguf_splits.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path) -> Tokenizer:
    return GGUFSource(smollm2_gguf, "smollm2").tokenizer()


def test_ids_equal_llama_cpp(smollm2: Tokenizer) -> None:
    for row in json.loads(SAMPLE.read_text(encoding="utf-8")):
        assert smollm2.encode(row["text"], add_special_tokens=False) == row["ids"], row["text"]


@pytest.fixture(scope="module")
def oracle(smollm2_gguf: Path) -> Any:
    """Return the default model's tokenizer as transformers builds it from the same file."""
    with files_read_once():
        return AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)


def test_ids_equal_transformers(smollm2: Tokenizer, oracle: Any) -> None:
    # transformers 5.23 does not know the pre-tokenizer "smollm" and leaves runs of digits whole.
    texts = [text for text in strings() if not any(character.isnumeric() for character in text)]
    assert len(texts) > 300
    for text in texts:
        ids = oracle.encode(text, add_special_tokens=False)
        assert smollm2.encode(text, add_special_tokens=False) == ids, text
        assert smollm2.decode(ids, skip_special_tokens=False) == oracle.decode(ids), text


def test_chat_equals_transformers(smollm2: Tokenizer, oracle: Any) -> None:
    system = {"role": "system", "content": "Be brief."}
    user, assistant = {"role": "user", "content": "Hi <b>&</b>"}, {"role": "assistant", "content": "Hello."}
    for messages in ([user], [system, user], [system, user, assistant, user]):
        for prompt in (True, False):
            text = oracle.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
            assert smollm2.render_chat(messages, add_generation_prompt=prompt) == text
    ids = smollm2.encode(smollm2.render_chat([user]), add_special_tokens=False)
    assert ids[:1] == [smollm2.token_to_id("<|im_start|>")]


def test_special_tokens(smollm2: Tokenizer) -> None:
    assert (smollm2.vocab_size, smollm2.bos_token_id, smollm2.eos_token_id) == (49152, 1, 2)
    assert smollm2.id_to_token(2) == "<|im_end|>"
    assert smollm2.token_to_id("no such token") is None
    assert smollm2.id_to_token(1 << 20) is None
    assert smollm2.encode("hi<|im_end|>")[-1] == 2
    assert smollm2.decode([19556, 2]) == "Hello"
    assert smollm2.decode([19556, 2], skip_special_tokens=False) == "Hello<|im_end|>"
    assert smollm2.decode([19556, 1 << 20]) == "Hello"


# SmolLM2's vocabulary has no token for these control characters, nor for the bytes that begin planes 4 to 11.
SPELLABLE = st.characters(
    max_codepoint=0x3FFFF, exclude_categories=["Cs"], exclude_characters="\x04\x06\x13\x14\x16\x1d"
)
TRICKY = st.lists(st.sampled_from(["<|im_end|>", " ", "\n", "é", "🎿", "12", "a"])).map("".join)


@given(text=st.text(SPELLABLE) | TRICKY)
@settings(max_examples=300, deadline=None)
def test_round_trip(smollm2: Tokenizer, text: str) -> None:
    ids = smollm2.encode(text, add_special_tokens=False)
    assert smollm2.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS.keys() & GGUF_PRE_TOKENIZER_SPLITS.keys()))
def test_splits_equal_transformers(name: str) -> None:
    ours = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PRE_TOKENIZERS[name].patterns]
    oracle = pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[name]), "isolated")
    for text in strings(300):
        assert pre_tokenizers.Sequence(ours).pre_tokenize_str(text) == oracle.pre_tokenize_str(text), text


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [
        ("glm4", "It's 12345 Ünits\n\n x", ["It", "'s", " ", "123", "45", " Ünits", "\n\n", " x"]),
        ("command-r", "It's 12 Ünits\n x", ["It", "'s", " ", "1", "2", " Ünits", "\n", " x"]),
        ("seed-coder", "IT'S 12 x;\n y", ["IT", "'S", " ", "1", "2", " x", ";", "\n", " y"]),
        (
            "deepseek-v3",
            "a 12345 日本と語x $5 .net\n",
            ["a", " ", "123", "45", " ", "日本と語", "x", " $", "5", " .", "net", "\n"],
        ),
        (
            "deepseek-llm",
            "Größe 12, 你好x!\r\n y  ",
            ["Gr", "öß", "e", " ", "1", "2", ",", " ", "你好", "x", "!", "\r", "\n", " y", "  "],
        ),
    ],
)
def test_splits_of_deepseek_glm_cohere_and_seed(name: str, text: str, pieces: list[str]) -> None:
    """transformers has no splits of these files; the expected pieces follow from llama.cpp's `llama-vocab.cpp`.

    Only the single digits of deepseek-llm follow from the published `tokenizer.json`: llama.cpp keeps runs of digits.
    """
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PRE_TOKENIZERS[name].patterns]
    assert [piece for piece, _ in pre_tokenizers.Sequence(splits).pre_tokenize_str(text)] == pieces


@pytest.mark.parametrize(("name", "pieces"), [(name, pieces) for name, *pieces in SPLITS[1:]])
def test_splits_equal_llama_cpp(name: str, pieces: list[list[str]]) -> None:
    """The pieces were written by `benchmarks.tokenizer_parity` while 2,000 texts had the ids of llama.cpp."""
    splits = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PRE_TOKENIZERS[name].patterns]
    )
    for text, expected in zip(SPLITS[0][1:], pieces, strict=True):
        assert [piece for piece, _ in splits.pre_tokenize_str(text)] == expected, text


def test_every_rule_is_compared_with_llama_cpp() -> None:
    compared = {PRE_TOKENIZERS[name] for name, *_ in SPLITS[1:]}
    others = {name for name, rules in PRE_TOKENIZERS.items() if rules not in compared and not rules.marks_spaces}
    assert others == {"command-r", "qwen2", "qwen35", "deepseek-llm", "tekken", "gpt-4o", *O200K}, "docs name reasons"


O200K = ("llama4", "kanana2", "talkie", "minimax-m2")


def test_long_runs_of_digits_and_of_characters_in_no_class() -> None:
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PRE_TOKENIZERS["afmoe"].patterns]
    for text in ("7" * 200_000, "\x07" * 200_000 + "x"):
        pieces = pre_tokenizers.Sequence(splits).pre_tokenize_str(text)
        assert "".join(piece for piece, _ in pieces) == text
    assert [piece for piece, _ in pre_tokenizers.Sequence(splits).pre_tokenize_str("7" * 7)] == ["7", "777", "777"]


@pytest.mark.parametrize("pre", ["gemma4", "sarvam-moe"])
def test_tokens_of_text_with_marks_for_spaces(pre: str, tmp_path: Path) -> None:
    """A file may name such a pre-tokenizer beside the model gpt2."""
    tokenizer = load(tmp_path, GEMMA4, model="gpt2", pre=pre)
    assert spelled(tokenizer, "ab a\n\né", add_special_tokens=False) == ["ab", "▁a", "\n\n", "<0xC3>", "<0xA9>"]
    assert (spelled(tokenizer, "a")[0] == "<s>") is (pre == "gemma4")
    assert tokenizer.decode(tokenizer.encode("ab a\n\né")) == "ab a\n\né"


@pytest.mark.parametrize("name", ["gpt-2", "exaone4", "mellum"])
def test_gpt2_split_equals_the_library(name: str) -> None:
    (pattern,) = PRE_TOKENIZERS[name].patterns
    ours = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    oracle = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for text in strings(300):
        assert [p for p, _ in ours.pre_tokenize_str(text)] == [p for p, _ in oracle.pre_tokenize_str(text)], text


# A vocabulary of bytes in GPT-2's spelling, with a few merges.
BYTES = [chr(c) for c in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))]
BPE: dict[str, Any] = {
    "model": "gpt2",
    "pre": "smollm",
    "tokens": [*BYTES, "he", "ll", "hell", "Ġhe", "<end>", "<think>", ""],
    "token_type": [1] * (len(BYTES) + 4) + [3, 4, 5],
    "merges": ["h e", "l l", "he ll", "Ġ he"],
    "eos_token_id": len(BYTES) + 4,
    "bos_token_id": len(BYTES) + 4,
}
PIECES = ["a", "b", "ab", "▁", "▁a", "▁ab", "aab"]
SPM: dict[str, Any] = {
    "model": "llama",
    "tokens": ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], *PIECES],
    "token_type": [2, 3, 3] + [6] * 256 + [1] * len(PIECES),
    "scores": [0.0] * 259 + [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -7.0],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "unknown_token_id": 0,
}


def load(folder: Path, base: dict[str, Any], **changes: Any) -> Tokenizer:
    metadata = {key: value for key, value in {**base, **changes}.items() if value is not None}
    path = write_tokenizer_gguf(folder / "t.gguf", metadata)
    return GGUFSource(path, "t").tokenizer()


def spelled(tokenizer: Tokenizer, text: str, **options: bool) -> list[str | None]:
    return [tokenizer.id_to_token(token) for token in tokenizer.encode(text, **options)]


def test_tiny_byte_level(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, BPE)
    assert spelled(tokenizer, "hello he12") == ["hell", "o", "Ġhe", "1", "2"]
    assert spelled(tokenizer, "<end>h<think>") == ["<end>", "h", "<think>"]
    ids = tokenizer.encode("<end>h<think>")
    assert tokenizer.decode(ids) == "h<think>", "user-defined tokens are text, control tokens are not"
    assert tokenizer.vocab_size == len(BPE["tokens"])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(tmp_path_factory.mktemp("tiny"), BPE)


@given(text=st.text() | st.lists(st.sampled_from(["<end>", "<think>", "<", "hell", " he"])).map("".join))
@settings(deadline=None)
def test_any_text_round_trips_with_a_full_byte_alphabet(tiny: Tokenizer, text: str) -> None:
    assert tiny.decode(tiny.encode(text), skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("pre", "adds"),
    [("smollm", False), ("llama-bpe", True), ("lfm2", True), ("qwen35", False), ("tekken", True), (None, False)],
)
def test_bos_by_default(tmp_path: Path, pre: str | None, adds: bool) -> None:
    assert (spelled(load(tmp_path, BPE, pre=pre), "h")[0] == "<end>") is adds


@pytest.mark.parametrize("base", [BPE, SPM], ids=["gpt2", "llama"])
def test_bos_and_eos_flags(tmp_path: Path, base: dict[str, Any]) -> None:
    tokenizer = load(tmp_path, base, add_bos_token=True, add_eos_token=True)
    ids = tokenizer.encode("a")
    assert (ids[0], ids[-1]) == (base["bos_token_id"], base["eos_token_id"])
    assert tokenizer.encode("a", add_special_tokens=False) == ids[1:-1]
    bare = load(tmp_path, base, add_bos_token=False)
    assert bare.encode("a") == bare.encode("a", add_special_tokens=False)


def test_tiny_sentencepiece(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, SPM)
    assert spelled(tokenizer, "ab a") == ["<s>", "▁ab", "▁a"]
    assert spelled(tokenizer, "a</s>b", add_special_tokens=False) == ["▁a", "</s>", "▁", "b"]
    assert spelled(tokenizer, "é", add_special_tokens=False) == ["▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("ab é a")) == "ab é a"
    bare = load(tmp_path, SPM, add_space_prefix=False)
    assert spelled(bare, "ab a", add_special_tokens=False) == ["ab", "▁a"]


MERGES = ["▁ a", "a b", "▁a b", "\n \n", "\n\n \n"]
GEMMA4: dict[str, Any] = {
    **SPM,
    "model": "gemma4",
    "tokens": [*SPM["tokens"], "\n", "\n\n", "\n\n\n"],
    "token_type": [*SPM["token_type"], 1, 1, 1],
    "scores": [-1000.0] * (len(SPM["tokens"]) + 3),
    "merges": MERGES,
}


@given(text=st.text() | st.lists(st.sampled_from(["a", "b", "ab", " ", "  ", "\n", "\n\n", "é"])).map("".join))
@settings(deadline=None)
def test_gemma4_equals_the_tokenizer_of_transformers(gemma4: tuple[Tokenizer, Any], text: str) -> None:
    ours, oracle = gemma4
    ids = oracle.encode(text, add_special_tokens=False)
    assert ours.encode(text, add_special_tokens=False) == ids
    assert ours.encode(text) == [1, *ids]
    assert ours.decode(ids, skip_special_tokens=False) == oracle.decode(ids)


@pytest.fixture(scope="module")
def gemma4(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    merges = [tuple(merge.split(" ")) for merge in MERGES]
    vocabulary = {token: index for index, token in enumerate(GEMMA4["tokens"])}
    oracle = GemmaTokenizer(vocab=vocabulary, merges=merges, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    return load(tmp_path_factory.mktemp("tiny"), GEMMA4), oracle


@given(text=st.text() | st.lists(st.sampled_from(["<end>", "<think>", "<", "hell", " he"])).map("".join))
@settings(deadline=None)
def test_token_bytes_of_byte_level_concatenate_to_the_text(tiny: Tokenizer, text: str) -> None:
    assert b"".join(map(tiny.token_bytes, tiny.encode(text))) == text.encode()


@pytest.fixture(scope="module", params=[True, False], ids=["space before", "as it is"])
def tiny_spm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(tmp_path_factory.mktemp("tiny"), SPM, add_space_prefix=request.param)


@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁")))
@settings(deadline=None)
def test_token_bytes_of_sentencepiece_concatenate_to_the_text(tiny_spm: Tokenizer, text: str) -> None:
    ids = tiny_spm.encode(text, add_special_tokens=False)
    leading = " " if text and tiny_spm.encode("a", add_special_tokens=False) == [tiny_spm.token_to_id("▁a")] else ""
    assert b"".join(map(tiny_spm.token_bytes, ids)) == (leading + text).encode()


@pytest.mark.parametrize(
    ("base", "token", "expected"),
    [
        (BPE, "Ġhe", b" he"),
        (BPE, "Ċ", b"\n"),
        (BPE, "ð", b"\xf0"),
        (BPE, "<end>", b"<end>"),
        (SPM, "▁ab", b" ab"),
        (SPM, "<0xF0>", b"\xf0"),
        (SPM, "</s>", b"</s>"),
    ],
)
def test_token_bytes(tmp_path: Path, base: dict[str, Any], token: str, expected: bytes) -> None:
    tokenizer = load(tmp_path, base)
    token_id = tokenizer.token_to_id(token)
    assert token_id is not None
    assert tokenizer.token_bytes(token_id) == expected
    for unknown in (-1, tokenizer.vocab_size, 1 << 40):
        assert tokenizer.token_bytes(unknown) == b""


def test_max_token_bytes(tmp_path: Path, smollm2: Tokenizer) -> None:
    assert load(tmp_path, BPE).max_token_bytes == len("[EMPTY_330]"), "padding has a name"
    assert load(tmp_path, SPM).max_token_bytes == len("<unk>")
    lengths = [len(smollm2.token_bytes(token_id)) for token_id in range(smollm2.vocab_size)]
    assert smollm2.max_token_bytes == max(lengths)
    assert min(lengths) > 0


@given(pieces=st.dictionaries(st.text("ab▁", min_size=1, max_size=5), st.floats(-9, 0), min_size=1, max_size=30))
def test_derived_merges_equal_transformers(pieces: dict[str, float]) -> None:
    oracle = generate_merges({piece: i for i, piece in enumerate(pieces)}, pieces)
    assert gguf_tokenizer.derive_merges(list(pieces), list(pieces.values())) == oracle


@pytest.mark.parametrize(
    ("base", "changes", "problem"),
    [
        (BPE, {"pre": "klingon"}, r"tokenizer\.ggml\.pre is 'klingon'.*supported: .*smollm"),
        (BPE, {"model": "bert"}, r"tokenizer\.ggml\.model is 'bert'.*gpt2, llama"),
        (BPE, {"model": None}, r"tokenizer\.ggml\.model is missing"),
        (BPE, {"tokens": None}, r"tokenizer\.ggml\.tokens is missing"),
        (BPE, {"merges": None}, r"tokenizer\.ggml\.merges is missing"),
        (BPE, {"merges": ["he"]}, r"tokenizer\.ggml\.merges must contain pairs"),
        (BPE, {"merges": ["q zz"]}, r"tokenizer\.ggml\.merges does not match the tokens"),
        (BPE, {"token_type": [1, 1]}, r"tokenizer\.ggml\.token_type has 2 entries, but there are \d+ tokens"),
        (BPE, {"tokens": ["a", "a"], "token_type": None, "merges": ["a a"]}, r"tokens contains 'a' twice"),
        (BPE, {"add_bos_token": 3}, r"add_bos_token must be true or false, got 3"),
        (
            SPM,
            {"tokens": ["a", "b"], "scores": [0.0, 0.0], "token_type": [1, 1], "unknown_token_id": None},
            r"tokens lacks '<unk>' and some",
        ),
        (SPM, {"scores": None}, r"tokenizer\.ggml\.scores is missing"),
        (SPM, {"scores": [1.0]}, r"tokenizer\.ggml\.scores has 1 entries"),
    ],
)
def test_errors_name_file_and_key(tmp_path: Path, base: dict[str, Any], changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ModelLoadError, match=r"t\.gguf: .*" + problem):
        load(tmp_path, base, **changes)


def test_named_templates_of_a_file(tmp_path: Path) -> None:
    path = load_path(tmp_path)
    file = GGUFFile(path)
    file.metadata |= {
        "tokenizer.chat_template": "D",
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template.tool_use": "T",
    }
    template = gguf_tokenizer.gguf_tokenizer(file).chat_template
    assert template is not None
    assert (template.render([]), template.render([], tools=[])) == ("D", "T")


def load_path(folder: Path) -> Path:
    load(folder, BPE)
    return folder / "t.gguf"


def cached_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.tokenizer.json"))


def test_tokenizer_is_built_once_and_then_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load(tmp_path, BPE)
    (cached,) = cached_files(tmp_path)
    monkeypatch.setattr(gguf_tokenizer, "build_tokenizer", lambda vocabulary: pytest.fail("built again"))
    again = gguf_tokenizer.gguf_tokenizer(GGUFFile(tmp_path / "t.gguf"))
    for text in strings(100):
        assert again.encode(text) == first.encode(text)
    assert cached_files(tmp_path) == [cached]


@pytest.mark.parametrize("junk", ["", "{", '{"version": "1.0"}', "not json"])
def test_damaged_cache_is_rebuilt(tmp_path: Path, junk: str) -> None:
    ids = load(tmp_path, BPE).encode("hello")
    (cached,) = cached_files(tmp_path)
    cached.write_text(junk)
    assert gguf_tokenizer.gguf_tokenizer(GGUFFile(tmp_path / "t.gguf")).encode("hello") == ids
    assert json.loads(cached.read_text())["model"]["type"] == "BPE"


def test_tokenizer_of_a_changed_model_is_rebuilt(tmp_path: Path) -> None:
    assert spelled(load(tmp_path, BPE), "hello") == ["hell", "o"]
    assert spelled(load(tmp_path, BPE, merges=["h e"]), "hello") == ["he", "l", "l", "o"]


def use_only_the_shared_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the folders of models be read-only."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))

    def reject_model_folder(path: Path, text: str) -> None:
        if not path.is_relative_to(tmp_path / "cache"):
            raise PermissionError(13, "read-only", str(path))
        write_atomically(path, text)

    monkeypatch.setattr(gguf_tokenizer, "write_atomically", reject_model_folder)


def test_models_with_equal_names_sizes_and_times_have_tokenizers_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in container images, whose files have the time 1, with a cache that two servers share."""
    use_only_the_shared_cache(tmp_path, monkeypatch)
    for merge, tokens in {"h e": ["he", "l", "l", "o"], "l l": ["h", "e", "ll", "o"]}.items():
        (tmp_path / merge).mkdir()
        path = write_tokenizer_gguf(tmp_path / merge / "t.gguf", {**BPE, "merges": [merge]})
        os.utime(path, (1, 1))
        assert spelled(GGUFSource(path, "t").tokenizer(), "hello") == tokens
    sizes = {path.stat().st_size for path in tmp_path.glob("*/t.gguf")}
    assert len(sizes) == 1
    assert len(cached_files(tmp_path / "cache" / "models")) == 2


def test_read_only_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_only_the_shared_cache(tmp_path, monkeypatch)
    assert spelled(load(tmp_path, BPE), "hello") == ["hell", "o"]
    assert cached_files(tmp_path) == []
    assert len(cached_files(tmp_path / "cache" / "models")) == 1
