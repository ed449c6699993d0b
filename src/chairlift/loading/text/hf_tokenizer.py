"""The tokenizer of a Hugging Face folder: `tokenizer.json` and its settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import tokenizers
from tokenizers import AddedToken

from chairlift.errors import ModelLoadError
from chairlift.loading.json_files import read_json
from chairlift.loading.text.chat_template import named_templates
from chairlift.loading.text.tokenizer import Tokenizer
from chairlift.loading.text.tokenizer_class import apply_tokenizer_class, tokenizer_class
from chairlift.system.input_files import read_bytes, read_text

ROLES: Final = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
LISTS: Final = ("extra_special_tokens", "additional_special_tokens")
SLOW_FILES: Final = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
"""Files of tokenizers that are not in `tokenizer.json`."""

SETTINGS: Final = "tokenizer_config.json"
PROCESSOR_FILES: Final = ("chat_template.json", "processor_config.json")
"""Files in which models with images may have the only copy of their chat template."""


def folder_tokenizer(folder: Path, *, has_settings: bool = True) -> Tokenizer:
    """Load the tokenizer of a folder. It returns the same ids as AutoTokenizer of transformers 5.

    It consists of `tokenizer.json` and the optional files `tokenizer_config.json`, `special_tokens_map.json`,
    `added_tokens.json`, and `chat_template.jinja` or an older file of the template. `add_bos_token` and `add_eos_token`
    have no effect, as in transformers: `tokenizer.json` and the class of the tokenizer specify these tokens.

    Args:
        has_settings: whether the other files are read. A StaticEmbedding reads `tokenizer.json` alone.

    Raises:
        ModelLoadError: `tokenizer.json` is missing, or a file is damaged.
    """
    settings = _settings(folder) if has_settings else {}
    special_tokens = {role: text for role in ROLES if (text := _text(settings.get(role))) is not None}
    file = folder / "tokenizer.json"
    if not file.is_file():
        hint = (
            "Download it from the page of the model, or of the base model of a fine-tuned one; an engine without a "
            "tokenizer (skip_tokenizer_init) takes prompts of token ids"
        )
        if any((folder / name).is_file() for name in SLOW_FILES):
            hint = "Convert the slow tokenizer of an older model with transformers' AutoTokenizer and save_pretrained()"
        if (folder / "tiktoken.model").is_file():
            hint = (
                "The code of the model reads tiktoken.model, and is not run: convert it with transformers' "
                "TikTokenConverter, and with the pattern and the special tokens of tokenization_*.py"
            )
        raise ModelLoadError(f"{file}: is missing. {hint}")
    try:
        raw = read_bytes(file)
        backend = tokenizers.Tokenizer.from_buffer(raw)
    except Exception as error:  # The library raises no narrower type.
        raise ModelLoadError(
            f"{file}: cannot be read ({error}); if it is truncated or damaged, download it again"
        ) from error
    if not has_settings:
        return Tokenizer(backend)
    has_byte_level = b'"ByteLevel"' in raw
    name = tokenizer_class(settings, read_json(folder / "config.json"), has_byte_level=has_byte_level)
    try:
        apply_tokenizer_class(backend, name, settings | special_tokens)
        _add_tokens(backend, settings)
    except Exception as error:  # The library raises no narrower type.
        raise ModelLoadError(f"{folder / SETTINGS}: has a value of a wrong type ({error}); download it again") from None
    return Tokenizer(backend, special_tokens=special_tokens, chat_template=_chat_templates(folder, settings))


def _settings(folder: Path) -> dict[str, Any]:
    """The settings, with the special tokens and the added tokens in the files of older versions."""
    settings, special = read_json(folder / SETTINGS), read_json(folder / "special_tokens_map.json")
    if "added_tokens_decoder" in settings:
        return special | settings
    return settings | special | {"added_tokens": read_json(folder / "added_tokens.json")}


def _text(token: Any) -> str | None:
    """Return the text of a special token, which is a string or an object with `content`."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _add_tokens(backend: tokenizers.Tokenizer, settings: Mapping[str, Any]) -> None:
    """Add the tokens of the settings, in the order of transformers.

    Unlike there, a special token without an id is not added, because the model has no embedding of it.
    """
    known = {repr(token) for token in backend.get_added_tokens_decoder().values()}
    decoder = settings.get("added_tokens_decoder") or {}
    listed = (AddedToken(**decoder[token_id]) for token_id in sorted(decoder, key=int))
    backend.add_tokens([token for token in listed if repr(token) not in known])
    special = [token for token in _special_tokens(settings) if backend.token_to_id(token.content) is not None]
    texts = {token.content for token in special}
    older = settings.get("added_tokens", {})
    for text in sorted(older, key=older.__getitem__):
        _add_missing(backend, AddedToken(text, normalized=text not in texts, special=text in texts))
    for token in special:
        _add_missing(backend, token)


def _add_missing(backend: tokenizers.Tokenizer, token: AddedToken) -> None:
    if all(token.content != other.content for other in backend.get_added_tokens_decoder().values()):
        backend.add_tokens([token])


def _special_tokens(settings: Mapping[str, Any]) -> Iterator[AddedToken]:
    lists = next((value for key in LISTS if isinstance(value := settings.get(key), list)), [])
    for token in (*(settings.get(role) for role in ROLES), *lists):
        if isinstance(token, dict):
            flags = {key: value for key, value in token.items() if key not in ("__type", "special")}
            yield AddedToken(**flags, special=True)
        elif isinstance(token, str):
            yield AddedToken(token, special=True)


def _chat_templates(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """The templates by name. Files take precedence over the settings, and these over the files of older processors."""
    named = {file.stem: file for file in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    files = {"default": folder / "chat_template.jinja", **named}
    try:
        found = {name: read_text(file) for name, file in files.items() if file.exists()}
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{folder}: a chat template cannot be read ({error}); download it again") from error
    older = (settings, *(read_json(folder / name) for name in PROCESSOR_FILES))
    return found or next(filter(None, (named_templates(each.get("chat_template")) for each in older)), {})
