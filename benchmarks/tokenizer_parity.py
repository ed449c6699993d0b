"""Compares the tokenizers of GGUF files with those of llama.cpp, for each pre-tokenizer, on 2,000 texts.

    python -m benchmarks.tokenizer_parity [--names llama4 kimi-k2] [--write tests/data/gguf_splits.json]

It needs `pip install xllamacpp==2026.10.11549`, whose library exports the functions of `llama.h`. The merges are
learned from whole texts, without a pre-tokenizer, so that they cross all positions at which one may split: the ids show
every split. `--write` writes the pieces of SAMPLES, which are among the texts, once for names with the same rules and
without a text that differs.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import runpy
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import gguf
import xllamacpp  # type: ignore[import-not-found]
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from chairlift.loading.gguf_file import GGUFFile
from chairlift.loading.text.gguf_tokenizer import GGUFVocabulary, build_tokenizer
from chairlift.loading.text.split_patterns import PRE_TOKENIZERS, PreTokenizer

CORPUS: Final = Path(__file__).parents[1] / "tests/loading/text/tokenizer_corpus.py"
NUM_TEXTS: Final = 2000
SAMPLES: Final = (
    *("It's 12345 HelloWorld x1234y", "  \t 24495\n \r\n x  ", "नमस्ते दुनिया", "1234年 12٣345 ²³", "日本と語x カ中文"),
    *(
        "a b cd e",
        "WÖRLD'S ЙцУкен'll",
        "!!/\n\n//x ...y",
        "\u3000abc ab\u200ccd e\u0301f",
        "<sentinel:3>IMGIMGABZ    x",
    ),
    *("¡a؟ b، c (d|e)", "ÀÉ\x0712 가나ㄱ…"),
)
SPELLINGS: Final = ("<|", "</s>", "<s>", "[MASK]", "<mask>", "<pad>", "<unk>", "\0")
"""Texts with these are compared, but no merges are learned from them: llama.cpp takes some for special tokens."""
VOCAB_ONLY: Final = 72  # The offset of `vocab_only` in `struct llama_model_params`, which has 80 bytes.


class _Params(ctypes.Structure):
    _fields_ = (("raw", ctypes.c_ubyte * 80),)


def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(next(Path(xllamacpp.__file__).parent.glob("*.so"))))
    library.llama_log_set(_silent, None)
    library.llama_model_default_params.restype = _Params
    library.llama_model_load_from_file.argtypes = (ctypes.c_char_p, _Params)
    library.llama_model_load_from_file.restype = ctypes.c_void_p
    library.llama_model_get_vocab.argtypes = library.llama_model_free.argtypes = (ctypes.c_void_p,)
    library.llama_model_get_vocab.restype = ctypes.c_void_p
    ids, flags = (ctypes.POINTER(ctypes.c_int32), ctypes.c_int32), (ctypes.c_bool, ctypes.c_bool)
    library.llama_tokenize.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int32, *ids, *flags)
    return library


_silent = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda level, text, data: None)


def _llama_ids(library: ctypes.CDLL, path: Path, texts: list[str]) -> Iterator[list[int]]:
    params = library.llama_model_default_params()
    params.raw[VOCAB_ONLY] = 1
    model = library.llama_model_load_from_file(str(path).encode(), params)
    vocabulary = library.llama_model_get_vocab(model)
    for text in texts:
        raw = text.encode()
        ids = (ctypes.c_int32 * (2 * len(raw) + 16))()
        yield ids[: library.llama_tokenize(vocabulary, raw, len(raw), ids, len(ids), True, True)]
    library.llama_model_free(model)


def _learn_vocabulary(texts: list[str], *, marks_spaces: bool) -> dict[str, Any]:
    backend = Tokenizer(models.BPE())
    if marks_spaces:
        backend.normalizer = normalizers.Replace(" ", "▁")
        backend.pre_tokenizer = pre_tokenizers.Split("\n", behavior="contiguous")
    else:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = [] if marks_spaces else pre_tokenizers.ByteLevel.alphabet()
    options: dict[str, Any] = {
        "vocab_size": 40_000,
        "min_frequency": 1,
        "max_token_length": 400,
        "show_progress": False,
    }
    learned = [text for text in texts if not any(spelling in text for spelling in SPELLINGS)]
    backend.train_from_iterator(learned, trainers.BpeTrainer(initial_alphabet=alphabet, **options))
    model = json.loads(backend.to_str())["model"]
    special = ["<unk>", "<bos>", "<eos>", *([f"<0x{byte:02X}>" for byte in range(256)] if marks_spaces else [])]
    tokens = [*special, *(token for token in model["vocab"] if token not in special)]
    types = [gguf.TokenType.UNKNOWN, *[gguf.TokenType.CONTROL] * 2, *[gguf.TokenType.BYTE] * (len(special) - 3)]
    return {
        "tokens": tokens,
        "token_type": [int(kind) for kind in types] + [1] * (len(tokens) - len(special)),
        "merges": [" ".join(merge) for merge in model["merges"]],
    }


def _write(path: Path, name: str, vocabulary: dict[str, Any]) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(name)
    for key, value in vocabulary.items():
        writer.add_array(f"tokenizer.ggml.{key}", value)
    for role, token_id in {"unknown": 0, "bos": 1, "eos": 2}.items():
        writer.add_uint32(f"tokenizer.ggml.{role}_token_id", token_id)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def _compare(library: ctypes.CDLL, path: Path, texts: list[str]) -> tuple[list[str], Tokenizer]:
    backend = build_tokenizer(GGUFVocabulary(GGUFFile(path)))
    ids = _llama_ids(library, path, texts)
    return [text for text, expected in zip(texts, ids, strict=True) if backend.encode(text).ids != expected], backend


def _pieces(backend: Tokenizer) -> list[list[str]]:
    split = backend.pre_tokenizer.pre_tokenize_str
    return [[text[start:end] for _, (start, end) in split(text)] for text in SAMPLES]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--names", nargs="+", default=sorted(PRE_TOKENIZERS))
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    library = _library()
    texts = [*SAMPLES, *runpy.run_path(str(CORPUS))["strings"](NUM_TEXTS - len(SAMPLES))]
    vocabularies = {marks: _learn_vocabulary(texts, marks_spaces=marks) for marks in (False, True)}
    written: dict[PreTokenizer, list[Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.names:
            rules = PRE_TOKENIZERS[name]
            _write(path := Path(folder) / "t.gguf", name, vocabularies[rules.marks_spaces])
            different, backend = _compare(library, path, texts)
            print(f"{name}: {len(different)} of {len(texts)} texts differ", *map(repr, different[:2]), flush=True)
            if rules.patterns and not different:
                written.setdefault(rules, [name, *_pieces(backend)])
    if arguments.write is not None:
        rows = (json.dumps(row, ensure_ascii=False) for row in ([None, *SAMPLES], *written.values()))
        arguments.write.write_text("[" + ",\n".join(rows) + "]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
