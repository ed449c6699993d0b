"""OutputConstraints: checks the constraints that requests put on their outputs, and resolves them to token ids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from chairlift.errors import RequestError
from chairlift.grammar.compiler import GrammarCompiler
from chairlift.loading.text.tokenizer import Tokenizer
from chairlift.sampling_params import SamplingParams


class OutputConstraints:
    """Checks structured outputs, bad words and allowed tokens of requests to one model.

    Args:
        tokenizer: None if the engine has no tokenizer.
        vocab_size: number of logits of the model.
        grammars: the compiler of structured outputs; None if the engine does not support them.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, grammars: GrammarCompiler | None) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._grammars = grammars

    def compile(self, params: SamplingParams) -> tuple[str, ...]:
        """Compile the grammar of a request and wait for it; returns at once if there is none or it is in the cache.
        Any thread may call it; do not call it on an event loop.

        Returns the parts of the schemas of tools that the grammar does not follow.

        Raises:
            RequestError: the grammar is invalid, is not supported, or exceeds a limit.
            OverloadedError: too many grammars are compiled at the moment.
        """
        if params.structured_outputs is None:
            return ()
        return self._compiler().compile(params.structured_outputs).ignored

    async def compile_in_background(self, params: SamplingParams, tenant: str = "") -> tuple[str, ...]:
        """Compile as `compile` does, on an event loop, in a turn of the tenant. Cancelling this call ends the work."""
        if params.structured_outputs is None:
            return ()
        return (await self._compiler().compile_in_background(params.structured_outputs, tenant)).ignored

    def _compiler(self) -> GrammarCompiler:
        if self._grammars is None:
            raise RequestError(
                "structured_outputs requires a tokenizer and a model with an EOS token; this engine lacks one of them",
                "structured_outputs",
            )
        return self._grammars

    def resolve(self, params: SamplingParams, stop_token_ids: Iterable[int]) -> SamplingParams:
        """Check the token ids of the parameters, and replace the bad words by token ids.

        Raises:
            RequestError: a word cannot be tokenized, a token is outside the vocabulary, or no token is left to sample.
        """
        for name in ("allowed_token_ids", "logit_bias", "stop_token_ids"):
            self._check_vocabulary(name, getattr(params, name) or ())
        words = [ids for word in params.bad_words for ids in self._token_ids(word)]
        for word in words:
            self._check_vocabulary("bad_words", word)
        masked = {word[-1] for word in words}
        if params.min_tokens:
            masked.update(token_id for token_id in stop_token_ids if token_id < self._vocab_size)
        if params.allowed_token_ids is None:
            num_left = self._vocab_size - len(masked)
        else:
            num_left = len(set(params.allowed_token_ids) - masked)
        if not num_left:
            raise RequestError(
                "no token is left to sample: allowed_token_ids must contain a token that is neither the last token of "
                "a bad word nor, if min_tokens is set, EOS or one of stop_token_ids",
                "allowed_token_ids" if params.allowed_token_ids is not None else "bad_words",
            )
        return replace(params, bad_words=words) if words else params

    def _token_ids(self, word: str | Sequence[int]) -> Sequence[Sequence[int]]:
        """The tokens of a word at the beginning of a text and after a space."""
        if not isinstance(word, str):
            return [word]
        if self._tokenizer is None:
            raise RequestError(
                "bad_words as text requires a tokenizer, which this engine lacks: use lists of token ids", "bad_words"
            )
        text = word.lstrip()
        spellings = [self._tokenizer.encode(form, add_special_tokens=False) for form in (text, " " + text)]
        if not all(spellings):
            raise RequestError(f"bad_words: {word!r:.100} has no tokens", "bad_words")
        return spellings[:1] if spellings[0] == spellings[1] else spellings

    def _check_vocabulary(self, name: str, token_ids: Iterable[int]) -> None:
        if (largest := max(token_ids, default=0)) >= self._vocab_size:
            raise RequestError(f"{name}: token id {largest} is outside 0..{self._vocab_size - 1}", name)
