"""The tokenizer of a Hugging Face folder: `tokenizer.json` and its settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import tokenizers

from chairlift.errors import ModelLoadError
from chairlift.loading.text.chat_template import select_template
from chairlift.loading.text.tokenizer import Tokenizer, set_bos_and_eos

ROLES: Final = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def folder_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer of a folder.

    It consists of `tokenizer.json` and the optional files `tokenizer_config.json`, `special_tokens_map.json` and
    `chat_template.jinja`.

    Raises:
        ModelLoadError: `tokenizer.json` is missing, or a file is damaged.
    """
    settings = {**read_json(folder / "special_tokens_map.json"), **read_json(folder / "tokenizer_config.json")}
    backend = _backend(folder)
    special_tokens = {role: text for role in ROLES if (text := _text(settings.get(role))) is not None}
    _apply_bos_and_eos_settings(backend, settings, special_tokens)
    return Tokenizer(backend, special_tokens=special_tokens, chat_template=_chat_template(folder, settings))


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object from a file; it is empty if there is no such file.

    Raises:
        ModelLoadError: the file cannot be read or contains no JSON object.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{file}: cannot be read as JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{file}: must contain a JSON object, got {type(value).__name__}")
    return value


def _backend(folder: Path) -> tokenizers.Tokenizer:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ModelLoadError(
            f"{file}: is missing. Some older models have only a slow tokenizer; convert it with transformers' "
            "AutoTokenizer and save_pretrained()"
        )
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # The library raises no narrower type.
        raise ModelLoadError(
            f"{file}: cannot be read ({error}); if it is truncated or damaged, download it again"
        ) from error


def _text(token: Any) -> str | None:
    """Return the text of a special token, which is a string or an object with `content`."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _apply_bos_and_eos_settings(
    backend: tokenizers.Tokenizer, settings: dict[str, Any], special_tokens: dict[str, str]
) -> None:
    """Apply `add_bos_token` and `add_eos_token`, which take precedence over tokenizer.json (as in transformers 5)."""
    flags = {key: settings[key] for key in ("add_bos_token", "add_eos_token") if settings.get(key) is not None}
    if not flags:
        return
    known = {role: text for role, text in special_tokens.items() if backend.token_to_id(text) is not None}
    set_bos_and_eos(
        backend,
        bos=known.get("bos_token") if flags.get("add_bos_token") else None,
        eos=known.get("eos_token") if flags.get("add_eos_token") else None,
    )


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return select_template(settings.get("chat_template"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{file}: cannot be read ({error}); download it again") from error
