"""What a request forbids its answer: checked against one model, and put into its tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from chairlift.errors import RequestError
from chairlift.grammar.compiler import GrammarCompiler
from chairlift.loading.text.tokenizer import Tokenizer
from chairlift.sampling_params import SamplingParams


class OutputConstraints:
    """Structured outputs, bad words and allowed tokens of requests to one model.

    Args:
        tokenizer: None where there is none.
        vocab_size: of the model's logits.
        grammars: compiles structured outputs; None where there can be none.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, grammars: GrammarCompiler | None) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._grammars = grammars

    def compile(self, params: SamplingParams) -> None:
        """Wait until the request's grammar is known to be good; at once if there is none, or it has been seen before.

        Raises:
            RequestError: naming the field, with what is wrong or which limit is exceeded.
        """
        if params.structured_outputs is None:
            return
        if self._grammars is None:
            raise RequestError(
                "structured_outputs needs a tokenizer, and a model that has an EOS token to end the answer with: "
                "this engine lacks one of them",
                "structured_outputs",
            )
        self._grammars.compile(params.structured_outputs)

    def resolved(self, params: SamplingParams, stop_token_ids: Iterable[int]) -> SamplingParams:
        """The parameters with bad words as token ids.

        Raises:
            RequestError: a word that cannot be tokenized, a token outside the vocabulary, no token left to sample.
        """
        self._check_vocabulary("allowed_token_ids", params.allowed_token_ids or ())
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
                "no token is left to sample: allowed_token_ids, less the last tokens of bad_words, less EOS and "
                "stop_token_ids while min_tokens lasts. Allow more.",
                "allowed_token_ids" if params.allowed_token_ids is not None else "bad_words",
            )
        return replace(params, bad_words=words) if words else params

    def _token_ids(self, word: str | Sequence[int]) -> Sequence[Sequence[int]]:
        """The tokens of a word, at the beginning of a text and within one."""
        if not isinstance(word, str):
            return [word]
        if self._tokenizer is None:
            raise RequestError(
                "bad_words needs a tokenizer for text, and this engine has none: give lists of token ids", "bad_words"
            )
        text = word.lstrip()
        spellings = [self._tokenizer.encode(form, add_special_tokens=False) for form in (text, " " + text)]
        if not all(spellings):
            raise RequestError(f"bad_words: {word!r:.100} has no tokens", "bad_words")
        return spellings[:1] if spellings[0] == spellings[1] else spellings

    def _check_vocabulary(self, name: str, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            if token_id >= self._vocab_size:
                raise RequestError(f"{name}: token id {token_id} is outside 0..{self._vocab_size - 1}", name)
