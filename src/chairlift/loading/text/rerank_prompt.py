"""The prompt of Qwen3-Reranker: a decoder answers whether a document meets a query, with "yes" or "no".

The texts are from its model card (https://huggingface.co/Qwen/Qwen3-Reranker-0.6B, Apache-2.0).
"""

from __future__ import annotations

from typing import Final

from chairlift.loading.text.marked_text import MarkedText
from chairlift.loading.text.tokenizer import Tokenizer, room_for_texts

PREFIX: Final = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
SUFFIX: Final = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
INSTRUCTION: Final = "Given a web search query, retrieve relevant passages that answer the query"


def encode_rerank_prompt(
    tokenizer: Tokenizer, query: str, document: str, max_tokens: int | None = None, instruction: str | None = None
) -> list[int]:
    """Encode the prompt of a query and a document. Spellings of special tokens in them remain text.

    Args:
        max_tokens: maximum number of tokens of the prompt, to which the end of the document is cut off.
        instruction: replaces INSTRUCTION; None or "" for INSTRUCTION.

    Raises:
        RequestError: as `room_for_texts`.
    """
    before, after = (tokenizer.encode(text, add_special_tokens=False) for text in (PREFIX, SUFFIX))
    texts = MarkedText(f"<Instruct>: {instruction or INSTRUCTION}\n<Query>: {query}\n<Document>: {document}")
    if max_tokens is None:
        return [*before, *tokenizer.encode(texts, add_special_tokens=False), *after]
    room = room_for_texts(max_tokens, len(before) + len(after))
    tokens, _is_whole = tokenizer.encode_part(texts, room, add_special_tokens=False)
    return [*before, *tokens[:room], *after]
