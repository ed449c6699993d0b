"""Tiny random models of sentence-transformers, which compute vectors and scores."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

import tokenizers
import torch
from tokenizers import models, normalizers, pre_tokenizers, processors

CORPUS: Final = [
    "The quick brown fox jumps over the lazy dog.",
    "A chairlift never stops for boarding: the next rider takes the seat.",
    "Memory is divided into blocks; requests wait in a queue.",
    "Wie viele Anfragen beantwortet der Server in einer Sekunde?",
]
TEXTS: Final = [*CORPUS, "dog", " ".join(CORPUS), "fox and dog wait in a queue"]
SPECIAL: Final = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
ROBERTA_TOKENS: Final = ("[CLS]", "[PAD]", "[SEP]", "[UNK]")
SIZES: Final = {
    "vocab_size": 300,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 90,
}
IDS: Final = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}


def word_pieces(special: tuple[str, ...]) -> dict[str, int]:
    """The special tokens, letters and words of the corpus; the library's trainer has other merges in every process."""
    words = sorted({word for text in CORPUS for word in re.findall(r"\w+|[^\w\s]", text.lower())})
    letters = sorted(set("".join(words)))
    pieces = dict.fromkeys([*special, *letters, *(f"##{letter}" for letter in letters), *words])
    return {piece: index for index, piece in enumerate(pieces)}


def write_tokenizer(folder: Path, end_token: str | None = None, special: tuple[str, ...] = ()) -> None:
    """A WordPiece tokenizer that adds [CLS] and [SEP] as BERT's does; with `end_token` only this one at the end.

    Args:
        special: the special tokens in the order of their ids; RoBERTa's positions depend on the id of [PAD].
    """
    backend = tokenizers.Tokenizer(models.WordPiece(word_pieces(special or tuple(SPECIAL.values())), unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    cls, sep = "[CLS]", end_token or "[SEP]"
    single = f"$A {sep}" if end_token else f"{cls} $A {sep}"
    backend.post_processor = processors.TemplateProcessing(
        single=single,
        pair=f"{single} $B:1 {sep}:1",
        special_tokens=[(token, backend.token_to_id(token)) for token in (cls, sep)],
    )
    backend.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 88, **SPECIAL}
    if end_token:
        settings["padding_side"] = "left"
    elif not special:
        settings["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def random_values(model: Any) -> Any:
    """The module with random parameters."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.5 if parameter.dim() == 1 else 0.0, 0.2)
    return model.eval().float()


def edit_json(file: Path, **changes: Any) -> None:
    """Change keys of an object in a file, which is created if there is none."""
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(content | changes))


def make_model(kind: str, **changes: Any) -> Any:
    """A random model of transformers: "bert", "roberta", "modernbert", "qwen3", "gemma3" or a cross-encoder
    ("bert-score").

    "qwen3bare" is what AutoModel writes: names without `model.`, and no LM head.

    Args:
        changes: further fields of the configuration.
    """
    import transformers

    family, _, is_score = kind.partition("-")
    options: dict[str, Any] = {**SIZES, **({"num_labels": 1} if is_score else {}), **changes}
    if family == "bert":
        config: Any = transformers.BertConfig(**options)
        kinds = (transformers.BertModel, transformers.BertForSequenceClassification)
    elif family == "roberta":
        config = transformers.XLMRobertaConfig(**options, type_vocab_size=1)
        kinds = (transformers.XLMRobertaModel, transformers.XLMRobertaForSequenceClassification)
    elif family == "modernbert":
        config = transformers.ModernBertConfig(**options, **IDS, local_attention=8, global_attn_every_n_layers=2)
        kinds = (transformers.ModernBertModel, transformers.ModernBertForSequenceClassification)
    elif family == "gemma3":
        layers = {"layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 16}
        config = transformers.Gemma3TextConfig(**options, **layers, num_key_value_heads=2, head_dim=16)
        kinds = (transformers.Gemma3TextModel,) * 2
    else:
        is_bare = family == "qwen3bare"
        config = transformers.Qwen3Config(
            **options, num_key_value_heads=2, head_dim=16, tie_word_embeddings=not is_bare
        )
        kinds = (transformers.Qwen3Model if is_bare else transformers.Qwen3ForCausalLM,) * 2
    return random_values(kinds[bool(is_score)](config))


def write_pooling_model(folder: Path, kind: str, pooling: str | None = "mean", normalize: bool = True) -> Path:
    """A folder of a random model.

    Args:
        pooling: "cls", "mean" or "lasttoken", in the files of sentence-transformers; None writes no such files.
    """
    make_model(kind).save_pretrained(folder)
    special = ROBERTA_TOKENS if kind.startswith("roberta") else ()
    write_tokenizer(folder, "[SEP]" if kind.startswith("qwen3") else None, special)
    if pooling is None:
        return folder
    modules = [("Transformer", ""), ("Pooling", "1_Pooling"), *([("Normalize", "2_Normalize")] if normalize else [])]
    (folder / "modules.json").write_text(
        json.dumps(
            [
                {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{name}"}
                for index, (name, path) in enumerate(modules)
            ]
        )
    )
    (folder / "1_Pooling").mkdir()
    (folder / "2_Normalize").mkdir()
    names = {"cls": "cls_token", "mean": "mean_tokens", "lasttoken": "lasttoken"}
    settings = {f"pooling_mode_{name}": key == pooling for key, name in names.items()}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 64, **settings}))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 80, "do_lower_case": False}))
    return folder
