"""The tokens that end an answer because of their text.

A GGUF file names one end token, although the model writes others too. llama.cpp therefore ends at each token whose text
is in a list (`special_eog_ids` in `src/llama-vocab.cpp`). Folders get the ends of the same list, so that a model ends
at the same tokens in both.
"""

from __future__ import annotations

import logging
from typing import Final

from chairlift.loading.text.tokenizer import Tokenizer

END_TEXTS: Final = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|end_of_text|>", "<|endoftext|>", "<end_of_turn>"),
    *("<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<eos>", "[e~["),
    *("<end_of_utterance>", "<turn|>", "<|tool_response>", "<|ifm|im_end|>", "<｜end▁of▁sentence｜>"),
    *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    *("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    *("<|file_sep|>", "<|plamo:file_separator|>"),
)
"""The texts for which `llama_vocab_is_eog` of llama.cpp's build 11549 is true, without `</s>`."""
TAG: Final = "</s>"
"""The end of a text in some vocabularies, and the end tag of HTML in others."""
logger = logging.getLogger(__name__)


def add_listed_ends(end_ids: tuple[int, ...], tokenizer: Tokenizer, model: str) -> tuple[int, ...]:
    """Return the end tokens of a model with those that end because of their text, and log all of them."""
    listed = (tokenizer.token_to_id(text) for text in listed_ends(tokenizer))
    ends = tuple(dict.fromkeys((*end_ids, *(token_id for token_id in listed if token_id is not None))))
    logger.info("%s: an answer ends with %s", model, ", ".join(f"{tokenizer.id_to_token(i)!r} ({i})" for i in ends))
    return ends


def listed_ends(tokenizer: Tokenizer) -> list[str]:
    """The texts that end an answer, of the tokens of a tokenizer.

    As in llama.cpp, `<|end|>` separates the messages of a turn where other tokens end it (gpt-oss, Solar), and `</s>`
    is a tag of HTML in Gemma 4 and PLaMo. Unlike there, neither is an end where it is no special token (`</s>` of Qwen
    and Gemma 3).
    """

    def has_any(*texts: str) -> bool:
        return any(tokenizer.token_to_id(text) is not None for text in texts)

    texts = [text for text in END_TEXTS if has_any(text)]
    has_other_ends = has_any("<|call|>", "<|calls|>") and has_any("<|return|>", "<|flush|>")
    if has_other_ends or not tokenizer.is_special("<|end|>"):
        texts = [text for text in texts if text != "<|end|>"]
    is_end = tokenizer.is_special(TAG) and not has_any("<|tool_response>", "<|plamo:eos|>")
    return [*texts, *([TAG] if is_end else [])]
