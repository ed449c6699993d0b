"""The sampling parameters of a request, with vLLM's field names. Their constructor checks them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from chairlift.checked_record import check_when_constructed
from chairlift.errors import RequestError
from chairlift.slo import SLO
from chairlift.structured_outputs import Reasoning, StructuredOutputs

StructuredOutputsParams = StructuredOutputs
"""vLLM's name of the record, which its scripts import from the module of this name."""

MAX_LOGPROBS = 20
MAX_LOGPROB_ENTRIES = 4 << 20
"""Maximum number of logprobs in one response, or in one call of `LLM` if it returns those of all tokens."""

MAX_N = 128
MAX_BEAMS = 32
MAX_LENGTH_PENALTY = 10
"""Of both signs: a power of the number of tokens, which stays a finite number."""

MAX_BEAM_STOP_TOKENS = 64
"""Maximum number of tokens that end the beams of one request, for each of which a step compares one more token."""

MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 16 << 10
"""Maximum number of characters in all stop strings of one request."""

MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 256
SPELLINGS_PER_WORD = 2
"""Maximum number of token sequences into which a bad word is resolved: with and without a space before it."""

MAX_BAD_WORD_CHARACTERS = 8 << 10
"""Maximum number of characters in all bad words of one request."""

MAX_TOKEN_IDS = 1 << 19
"""Maximum number of token ids in `stop_token_ids` or `allowed_token_ids`; no vocabulary in use is larger."""

CHARACTERS_PER_TOKEN = 4
"""The characters of a text that count as one token in the size of sampling parameters."""

LONG_RETENTIONS = ("1h", "24h")
"""The values of `prompt_cache_retention` with which a prefix is kept longer, of Anthropic and of OpenAI."""

SEED_BITS = 64
MAX_INTEGER = (1 << 63) - 1
"""The largest integer of msgpack."""

CONTRADICTS_STRUCTURE = {
    "ignore_eos": "the answer ends where the structure ends. Remove it.",
    "bad_words": "the structure may need these words. Exclude them in the structure.",
    "allowed_token_ids": "the structure may need other tokens. Restrict them in the structure.",
}
"""Fields that cannot be combined with structured_outputs, with the reason and what to do."""

CONTRADICTS_BEAMS = (
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "min_tokens",
    "stop",
    "prompt_logprobs",
    "bad_words",
    "allowed_token_ids",
    "structured_outputs",
)
"""Fields that cannot be combined with use_beam_search, which compares the logprobs of unchanged logits."""


def _number(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RequestError(f"{name} must be a finite number, got {value!r}", name)
    if value < low or value > high or (open_low and value == low):
        left = "(" if open_low else "["
        raise RequestError(f"{name} must be in {left}{low:g}, {high:g}], got {value!r}", name)


def _integer(name: str, value: Any, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer, got {value!r}", name)
    if value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"between {low} and {high}"
        raise RequestError(f"{name} must be {limit}, got {value!r}", name)


def _flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise RequestError(f"{name} must be true or false, got {value!r}", name)


def _check_texts(name: str, texts: Sequence[str], limit: int) -> None:
    if (total := sum(map(len, texts))) > limit:
        raise RequestError(f"{name} must have at most {limit} characters in total, got {total}", name)
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise RequestError(
                f"{name} must be valid Unicode text without unpaired surrogates, got {text!r:.100}", name
            ) from None


def _items(name: str, value: Any, kind: str, limit: int) -> Sequence[Any]:
    """The items of a list; an empty tuple for None."""
    if value is None:
        return ()
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise RequestError(f"{name} must be a list of {kind}, got {value!r:.100}", name)
    if len(value) > limit:
        raise RequestError(f"{name} must have at most {limit} {kind}, got {len(value)}", name)
    return value


def _stop_strings(value: Any) -> tuple[str, ...]:
    is_list = isinstance(value, Sequence | None) and not isinstance(value, str)
    strings = _items("stop", value, "strings", MAX_STOP_STRINGS) if is_list else (value,)
    if not all(isinstance(s, str) for s in strings):
        raise RequestError(f"stop must be a string or a list of strings, got {value!r:.100}", "stop")
    if any(not s for s in strings):
        raise RequestError("stop must not contain an empty string, which would end every answer immediately", "stop")
    _check_texts("stop", strings, MAX_STOP_CHARACTERS)
    return tuple(strings)


def _bad_words(value: Any) -> tuple[str | tuple[int, ...], ...]:
    is_resolved = isinstance(value, Sequence) and not any(isinstance(word, str) for word in value)
    limit = SPELLINGS_PER_WORD * MAX_BAD_WORDS if is_resolved else MAX_BAD_WORDS
    items = _items("bad_words", value, "token sequences" if is_resolved else "words", limit)
    words = tuple(word if isinstance(word, str) else _token_ids("bad_words", word) for word in items)
    _check_texts("bad_words", [word for word in words if isinstance(word, str)], MAX_BAD_WORD_CHARACTERS)
    if not all(word.strip() if isinstance(word, str) else word for word in words):
        raise RequestError("bad_words must not contain an empty word or a word of spaces", "bad_words")
    return words


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    """The token ids of a list."""
    token_ids = tuple(_items(name, value, "token ids", MAX_TOKEN_IDS))
    if wrong := [token for token in token_ids if isinstance(token, bool) or not isinstance(token, int)]:
        raise RequestError(f"{name} must be a list of token ids, got {wrong[0]!r:.100} in it", name)
    _integer(name, min(token_ids, default=0), 0)
    return token_ids


def _distinct_ids(name: str, value: Any) -> tuple[int, ...]:
    """The token ids of a list that means a set, each once."""
    return tuple(dict.fromkeys(_token_ids(name, value)))


def _logit_bias(value: Any) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise RequestError(f"logit_bias must map token ids to numbers, got {value!r:.100}", "logit_bias")
    if len(value) > MAX_LOGIT_BIAS:
        raise RequestError(f"logit_bias must have at most {MAX_LOGIT_BIAS} tokens, got {len(value)}", "logit_bias")
    bias: dict[int, float] = {}
    for key, amount in value.items():
        try:
            token = int(key)
        except (TypeError, ValueError):
            raise RequestError(f"logit_bias keys must be token ids, got {key!r}", "logit_bias") from None
        _integer("logit_bias", token, 0)
        _number("logit_bias", amount, -100, 100)
        bias[token] = float(amount)
    return bias


@check_when_constructed
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The parameters that determine how the tokens of one request are sampled.

    Attributes:
        n: the number of answers to the prompt.
        temperature: 0 is greedy sampling.
        top_k: sample from the k most likely tokens; 0 or -1 from all.
        top_p: sample from the smallest set of tokens whose probabilities add up to top_p; 0 is greedy sampling.
        min_p: exclude tokens that are less likely than min_p times the most likely token.
        repetition_penalty: penalty for tokens of prompt and output (Keskar et al., 2019); 1 is none.
        presence_penalty, frequency_penalty: OpenAI's penalties for tokens of the output; 0 is none.
        logit_bias: token id -> value that is added to its logit, from -100 to 100.
        max_tokens: maximum number of output tokens; None is the maximum that the context, the pool and the model's
            generation configuration allow.
        min_tokens: EOS and stop_token_ids are masked until the output has this number of tokens.
        stop: strings that end the answer and are removed from it, unless include_stop_str_in_output is set.
        stop_token_ids: token ids that end the answer.
        ignore_eos: continue after the end-of-sequence token.
        logprobs: return the logprobs of each sampled token and of this number of most likely tokens; -1 is all tokens,
            which only `LLM` accepts.
        prompt_logprobs: return them for each prompt token except the first.
        seed: the seed of the random stream of the request; None lets the engine choose one.
        detokenize: return the text of the answer in addition to its token ids; stop and bad_words need it.
        skip_special_tokens: leave special tokens out of the text.
        truncate_prompt_tokens: keep this number of tokens at the end of the prompt; -1 keeps as many as fit beside
            max_tokens; None rejects a prompt that is too long.
        bad_words: words that are not generated: the token that would complete the tokens of a word is masked. A word is
            a text, with and without a space before it, or a list of token ids. Other token sequences that spell the
            word remain possible. At most MAX_BAD_WORDS texts, or SPELLINGS_PER_WORD times as many lists of token ids.
        allowed_token_ids: only these tokens are sampled; EOS must be listed to be sampled.
        structured_outputs: a constraint on the text of the answer.
        reasoning: the reasoning that may precede the answer. Stop strings are searched after it, and min_tokens counts
            the tokens after it. Its strings must be in the text: set skip_special_tokens=False if they are special.
        slo: the latencies that the request should have; goodput counts the requests that have them.
        is_streamed: the answer is read while it is generated. Others are not paced. False for calls of the server
            without `stream`, for `LLM`, and with beam search.
        prompt_cache_key: names the requests whose prompts begin in the same way, such as those of a session. It has an
            influence on how long the prefix cache keeps them, and none on what is found.
        prompt_cache_retention: "1h" and "24h" let the prefix cache expect that the prompt is soon used again.
        tools_start: about the position of the tools in the prompt, in tokens, which events show; None without tools.
        use_beam_search: return the `n` outputs with the best scores that a search with `n` beams finds, the best first.
        length_penalty: the score is the sum of the logprobs divided by the number of tokens to this power.
        early_stopping: when the search ends: with `n` answers (True), when a beam cannot become better than them as it
            is (False), or at any length ("never").

    Raises:
        RequestError: a value is out of range, or a field is unknown; the message names the field, the value and the
            limit. A record that is decoded from a message is not checked again.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    seed: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    detokenize: bool = True
    truncate_prompt_tokens: int | None = None
    bad_words: Sequence[str | Sequence[int]] = ()
    allowed_token_ids: Sequence[int] | None = None
    structured_outputs: StructuredOutputs | None = None
    reasoning: Reasoning | None = None
    slo: SLO | None = None
    is_streamed: bool = True
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    tools_start: int | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | str = False

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids", "bad_words", "allowed_token_ids"):
            if isinstance(value := getattr(self, name), list):
                items = (tuple(item) if isinstance(item, list) else item for item in value)
                object.__setattr__(self, name, tuple(items if name == "bad_words" else value))

    def check(self) -> None:
        """Check the fields, and remove what lists repeat. The constructor calls it."""
        _integer("n", self.n, 1, MAX_N)
        _number("temperature", self.temperature, 0, 100)
        _integer("top_k", self.top_k, -1, MAX_INTEGER)
        _number("top_p", self.top_p, 0, 1)
        _number("min_p", self.min_p, 0, 1)
        _number("repetition_penalty", self.repetition_penalty, 0, 100, open_low=True)
        _number("presence_penalty", self.presence_penalty, -2, 2)
        _number("frequency_penalty", self.frequency_penalty, -2, 2)
        _integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1)
            if self.min_tokens > self.max_tokens:
                raise RequestError(
                    f"min_tokens must be at most max_tokens={self.max_tokens}, got {self.min_tokens}", "min_tokens"
                )
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None and not (type(value) is int and value == -1):
                _integer(name, value, 0, MAX_LOGPROBS)
        if self.seed is not None:
            _integer("seed", self.seed, -(1 << (SEED_BITS - 1)), (1 << SEED_BITS) - 1)
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "detokenize", "is_streamed"):
            _flag(name, getattr(self, name))
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _distinct_ids("stop_token_ids", self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _logit_bias(self.logit_bias))
        object.__setattr__(self, "bad_words", _bad_words(self.bad_words))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", _distinct_ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                problem = "must have at least one token id; remove it to allow all tokens"
                raise RequestError(f"allowed_token_ids {problem}", "allowed_token_ids")
        self._check_constraints()
        _flag("use_beam_search", self.use_beam_search)
        _number("length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise RequestError(
                f'early_stopping must be true, false or "never", got {self.early_stopping!r:.100}', "early_stopping"
            )
        if self.use_beam_search:
            self._check_beams()
        elif self.length_penalty != 1 or self.early_stopping is not False:
            name = "length_penalty" if self.length_penalty != 1 else "early_stopping"
            raise RequestError(f"{name}={getattr(self, name)!r} needs use_beam_search: set it, or remove {name}", name)

    def clone(self) -> SamplingParams:
        """A copy, whose fields can be assigned without changing these."""
        return deepcopy(self)

    @property
    def has_all_logprobs(self) -> bool:
        """Whether logprobs of all tokens are returned."""
        return -1 in (self.logprobs, self.prompt_logprobs)

    @property
    def counts_after_reasoning(self) -> bool:
        """Whether the tokens before `min_tokens` depend on the end of the reasoning."""
        return self.min_tokens > 0 and self.reasoning is not None

    @property
    def size(self) -> int:
        """The size of the lists and texts, in tokens of a prompt that take about as long to send and to read."""
        constraint = self.structured_outputs
        texts = [*self.stop, *(word for word in self.bad_words if isinstance(word, str))]
        texts += () if constraint is None else constraint.texts
        listed = len(self.stop_token_ids) + len(self.allowed_token_ids or ()) + len(self.logit_bias)
        return listed + sum(map(len, texts)) // CHARACTERS_PER_TOKEN

    def _check_beams(self) -> None:
        """Check the fields that cannot be combined with beam search, and let the unused draw be a greedy one."""
        _integer("n", self.n, 1, MAX_BEAMS)
        defaults = {each.name: each.default for each in fields(self)} | {"stop": (), "bad_words": (), "logit_bias": {}}
        for name in CONTRADICTS_BEAMS:
            if (value := getattr(self, name)) != defaults[name] and not (name == "top_k" and value == -1):
                raise RequestError(
                    f"{name} cannot be combined with use_beam_search, which compares the logprobs of the model: remove "
                    "one of them",
                    name,
                )
        if self.temperature not in (0, 1):
            raise RequestError(
                f"temperature={self.temperature} cannot be combined with use_beam_search: remove it, or set it to 0",
                "temperature",
            )
        if self.logprobs == -1:
            raise RequestError(
                f"logprobs must be between 0 and {MAX_LOGPROBS} with use_beam_search, got -1: lower it", "logprobs"
            )
        if len(self.stop_token_ids) >= MAX_BEAM_STOP_TOKENS:
            raise RequestError(
                f"stop_token_ids must have fewer than {MAX_BEAM_STOP_TOKENS} token ids with use_beam_search, got "
                f"{len(self.stop_token_ids)}",
                "stop_token_ids",
            )
        object.__setattr__(self, "temperature", 0.0)
        object.__setattr__(self, "is_streamed", False)

    def _check_constraints(self) -> None:
        """Check combinations of fields. The input processor checks those that depend on the model."""
        if self.truncate_prompt_tokens is not None:
            _integer("truncate_prompt_tokens", self.truncate_prompt_tokens, -1, MAX_INTEGER)
            if self.truncate_prompt_tokens == 0:
                limit = "at least 1, or -1 for as many as fit"
                raise RequestError(f"truncate_prompt_tokens must be {limit}, got 0", "truncate_prompt_tokens")
        if self.stop and not self.detokenize:
            raise RequestError(
                "stop needs detokenize=True: remove detokenize=False, or use stop_token_ids", "detokenize"
            )
        if self.slo is not None and not isinstance(self.slo, SLO):
            raise RequestError(f"slo must be an SLO record, got {self.slo!r:.100}", "slo")
        if self.reasoning is not None and not isinstance(self.reasoning, Reasoning):
            raise RequestError(f"reasoning must be a Reasoning record, got {self.reasoning!r:.100}", "reasoning")
        constraint = self.structured_outputs
        if constraint is None:
            return
        if not isinstance(constraint, StructuredOutputs):
            raise RequestError(
                f"structured_outputs must be a StructuredOutputs record, got {constraint!r:.100}", "structured_outputs"
            )
        for name, why in CONTRADICTS_STRUCTURE.items():
            if getattr(self, name):
                raise RequestError(f"{name} cannot be combined with structured_outputs: {why}", name)


def _assign(self: SamplingParams, name: str, value: Any) -> None:
    """Assign a field, as scripts for vLLM do. It is checked as by the constructor, and an error changes nothing."""
    checked = replace(self, **{name: value})
    for each in fields(self):
        object.__setattr__(self, each.name, getattr(checked, each.name))


SamplingParams.__setattr__ = _assign  # type: ignore[assignment, method-assign]


@check_when_constructed
@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """The parameters of `LLM.beam_search`, with vLLM's field names.

    Attributes:
        beam_width: the number of beams, and of sequences that are returned.
        max_tokens, ignore_eos, temperature, length_penalty, skip_special_tokens: as in `SamplingParams`.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    skip_special_tokens: bool = True

    def check(self) -> None:
        """Check the fields. The constructor calls it."""
        _integer("beam_width", self.beam_width, 1, MAX_BEAMS)
        self.sampling_params()

    def sampling_params(self) -> SamplingParams:
        """The parameters of the search. As in vLLM, it returns the logprobs of twice as many tokens as beams."""
        given = asdict(self)
        width = given.pop("beam_width")
        return SamplingParams(n=width, use_beam_search=True, logprobs=min(2 * width, MAX_LOGPROBS), **given)


def check_logprobs(num_logprobs: int) -> None:
    """Raise RequestError if the answers to a call may have more than MAX_LOGPROB_ENTRIES logprobs."""
    if num_logprobs > MAX_LOGPROB_ENTRIES:
        raise RequestError(
            f"logprobs: the response may have up to {num_logprobs} entries (tokens x answers x logprobs), and at most "
            f"{MAX_LOGPROB_ENTRIES} are allowed: lower max_tokens, n or the number of logprobs, or send fewer prompts",
            "logprobs",
        )


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """The sampling parameters of requests that do not set them. None selects the default of `SamplingParams`.

    Attributes:
        max_new_tokens: maximum number of output tokens of every request of a server.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None

    def values(self) -> dict[str, Any]:
        """The fields that are not None."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def updated(self, other: SamplingDefaults) -> SamplingDefaults:
        """These defaults, replaced by those that `other` has."""
        return SamplingDefaults(**{**self.values(), **other.values()})

    def params(self, **given: Any) -> SamplingParams:
        """The sampling parameters of a request that has set only the `given` ones. Beam search has no defaults.

        Raises:
            RequestError: as `SamplingParams`.
        """
        defaults = {} if given.get("use_beam_search") else self.values()
        defaults.pop("max_new_tokens", None)
        return SamplingParams(**{**defaults, **given})
