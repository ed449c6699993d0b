"""InputProcessor: tokenizes prompts, checks them against the limits, and creates engine requests."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, cast

from chairlift.counts import counted
from chairlift.engine.chat_arguments import template_kwargs, with_joined_parts
from chairlift.engine.output_constraints import OutputConstraints
from chairlift.engine.pooled_prompts import PooledOptions, PooledPrompts
from chairlift.engine.request_limits import RequestLimits
from chairlift.errors import RequestError
from chairlift.grammar.compiler import GrammarCompiler
from chairlift.loading.text.marked_text import MarkedText, unmarked
from chairlift.loading.text.tokenizer import Tokenizer
from chairlift.models.declaration.model_config import ModelConfig
from chairlift.models.pooling import PoolingConfig
from chairlift.request import Request
from chairlift.sampling_params import MAX_INTEGER, MAX_LOGPROBS, SEED_BITS, SamplingParams

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or {"prompt": text} or {"prompt_token_ids": token ids} as in vLLM."""

Message = dict[str, Any]

# Odd 64-bit constants, so that the random streams of consecutive requests and of siblings start far apart.
REQUEST_STRIDE = 0x9E3779B97F4A7C15
SIBLING_STRIDE = 0xD1B54A32D192ED03

TRUNCATED_TEXT_FACTOR: Final = 8
"""Maximum length of a text that is truncated, in multiples of the context, if all of it must be tokenized first."""

CUT_TO_CONTEXT: Final = SamplingParams(truncate_prompt_tokens=-1)
NO_OPTIONS: Final = PooledOptions()


class NoTokenizer:
    """Replaces the tokenizer if none was loaded: prompts must be token ids, and answers have no text."""

    has_chat_template = False
    chat_template = None
    special_tokens: Mapping[str, str] = {}
    special_token_ids: frozenset[int] = frozenset()
    max_token_bytes = 1
    can_cut = False

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        raise RequestError("a prompt must be a list of token ids: this engine has no tokenizer", "prompt")

    def encode_part(self, text: str, _num: int, *, from_end: bool, add_special_tokens: bool) -> tuple[list[int], bool]:
        return self.encode(text, add_special_tokens=add_special_tokens), True

    def render_chat(self, messages: list[Message], **options: Any) -> str:
        raise RequestError("messages cannot be rendered: this engine has no tokenizer", "messages")

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return ""

    def token_bytes(self, token_id: int) -> bytes:
        return b""

    def special_tokens_in(self, text: str) -> list[str]:
        return []


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One sequence as it is sent to the engine core; see `Request` for the fields.

    `request_id` is unique among all requests of the engine, unlike the ids that users choose. Siblings share the prompt
    and the sampling parameters.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    max_tokens: int
    stop_token_ids: frozenset[int]
    seed: int
    arrival_time: float
    priority: int = 0
    leader_id: str | None = None
    output_len: int | None = None
    tenant: str = ""
    cache_salt: str | None = None
    deadline: float | None = None
    lora_id: int = 0

    def to_request(self) -> Request:
        """The request of the engine core, which has these fields too."""
        return Request(**{name: getattr(self, name) for name in self.__slots__})

    def siblings(self, others: Iterable[tuple[str, int]]) -> list[EngineRequest]:
        """This request, and one that shares everything with it for each of `others`, given by request id and seed."""
        params, leader_id = self.sampling_params, self.leader_id or self.request_id
        if params.prompt_logprobs is not None:  # Only the leader returns them.
            params = replace(params, prompt_logprobs=None)
        shared = replace(self, sampling_params=params, leader_id=leader_id)
        return [self, *(replace(shared, request_id=request_id, seed=seed) for request_id, seed in others)]


class _ResolvedParams(NamedTuple):
    """What the requests with the same sampling parameters share.

    Attributes:
        given: the parameters of the caller.
        params: the parameters of a request, whose bad words are token ids, and whose `n` is 1 or the number of beams.
        stop_token_ids: tokens that end an answer, including EOS unless it is ignored.
    """

    given: SamplingParams
    params: SamplingParams
    stop_token_ids: frozenset[int]


class InputProcessor:
    """Creates engine requests from prompts and sampling parameters.

    Args:
        seed: the source of seeds for requests without one, in order of arrival; None: the operating system.
        grammars: the compiler of a model runner in the same process; None creates one that only checks grammars.
        pooling: how texts become vectors or scores; None if the model generates text.
        id_prefix: a part of the ids in the core that is different in each process with the same engine.

    Attributes:
        constraints: compiles the grammar of a request, which may take seconds, before `make`.
    """

    def __init__(
        self,
        config: ModelConfig,
        tokenizer: Tokenizer | NoTokenizer,
        limits: RequestLimits,
        seed: int | None = None,
        grammars: GrammarCompiler | None = None,
        id_prefix: str = "",
        *,
        pooling: PoolingConfig | None = None,
    ) -> None:
        self._id_prefix = id_prefix
        self.tokenizer = tokenizer
        self.limits = limits
        self._vocab_size = config.vocab_size
        self._eos_token_ids = frozenset(config.eos_token_ids)
        self._shorten = f"Shorten it{', or set truncate_prompt_tokens=-1' if limits.is_pooling else ''}."
        self._seed = seed
        self._num_made = 0
        self._resolved: _ResolvedParams | None = None
        text_tokenizer = None if isinstance(tokenizer, NoTokenizer) else tokenizer
        self._num_unpooled = 0 if pooling is None else pooling.num_unpooled
        self._pooled: PooledPrompts | None = None
        if pooling is not None and text_tokenizer is not None:
            num_types = 1 if config.encoder is None else config.encoder.num_token_types
            self._pooled = PooledPrompts(text_tokenizer, pooling, num_types)
        if grammars is None and text_tokenizer is not None and config.eos_token_ids:
            eos = config.eos_token_ids
            grammars = GrammarCompiler(lambda: text_tokenizer, config.vocab_size, eos, is_check_only=True)
        self.constraints = OutputConstraints(text_tokenizer, config.vocab_size, grammars)

    def encode(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        add_special_tokens: bool = True,
        label: str = "prompt",
    ) -> tuple[str | None, list[int]]:
        """Tokenize and check a prompt; returns its text (None for token ids) and its tokens.

        Args:
            params: their `truncate_prompt_tokens` is applied.
            label: the field of the prompt in messages, with its index in a list, such as "prompt[3]".

        Raises:
            RequestError: the prompt is empty, of a wrong type or too long, or a token is outside the vocabulary.
        """
        given = prompt
        if isinstance(prompt, Mapping):
            if prompt.keys() not in ({"prompt"}, {"prompt_token_ids"}):
                keys = f"the key prompt or prompt_token_ids and no other, got {[*prompt]!r:.100}"
                raise RequestError(f"{label} must have {keys}", _field_of_label(label))
            prompt = next(iter(prompt.values()))
        if isinstance(prompt, str):
            return prompt, self.encode_text(prompt, label, params, add_special_tokens=add_special_tokens)
        token_ids = cast("list[int]", list(prompt) if isinstance(prompt, Sequence) else [None])
        if not all(type(token_id) is int for token_id in token_ids):
            raise RequestError(
                f"{label} must be a string or a list of token ids, got {given!r:.100}", _field_of_label(label)
            )
        return None, self._checked(token_ids, label, params)

    def encode_pooled(
        self,
        text: str,
        second: str | None = None,
        options: PooledOptions = NO_OPTIONS,
        labels: tuple[str, ...] = ("input",),
    ) -> list[int]:
        """Tokenize and check a text, or a pair of texts, of which a model computes a vector or a score.

        Args:
            labels: of each text, as for `encode`. A pair is "documents[3] with query" in messages.

        Returns:
            The tokens. A token of type n has its id plus n times the size of the vocabulary.

        Raises:
            RequestError: as `encode`.
        """
        assert self._pooled is not None, "a model that computes vectors or scores has a tokenizer"
        most = self._most_pooled(options.truncate_prompt_tokens)
        texts = [*zip((text, second or ""), labels, strict=False), (options.instruction or "", "instruction")]
        for each, label in texts:
            self._check_text(each, label, None if most is None else CUT_TO_CONTEXT)
        token_ids, types = self._pooled.encode(text, second, options, most)
        token_ids = self._checked(token_ids, " with ".join(reversed(labels)))
        if len(token_ids) <= self._num_unpooled:
            raise RequestError(
                f"{labels[0]} has no token behind the {self._num_unpooled} tokens of the prompt, which this model "
                "leaves out of the vector: send a longer text, or raise truncate_prompt_tokens",
                _field_of_label(labels[0]),
            )
        if types is None:
            return token_ids
        return [token_id + kind * self._vocab_size for token_id, kind in zip(token_ids, types, strict=True)]

    def encode_pooled_messages(self, text: MarkedText, options: PooledOptions) -> list[int]:
        """Tokenize and check a rendered conversation, of which a model computes a vector; raises as `encode`."""
        assert self._pooled is not None, "a model that computes vectors or scores has a tokenizer"
        self._check_pools_all("messages")
        most = self._most_pooled(options.truncate_prompt_tokens)
        self._check_text(text, "messages", None if most is None else CUT_TO_CONTEXT)
        return self._checked(self._pooled.encode_rendered(text, options, most), "messages")

    def check_pooled(
        self, token_ids: list[int], options: PooledOptions = NO_OPTIONS, label: str = "input"
    ) -> list[int]:
        """Check the tokens of a text, of which a model computes a vector; as `encode_pooled`."""
        assert self._pooled is not None, "a model that computes vectors or scores has a tokenizer"
        self._check_pools_all(label)
        kept = self._pooled.cut(token_ids, options, self._most_pooled(options.truncate_prompt_tokens))
        return self._checked(kept, label)

    def _check_pools_all(self, label: str) -> None:
        """Raise RequestError if the vector leaves out the tokens of a prompt, which is written before texts only."""
        if self._num_unpooled:
            message = "this model leaves the tokens of its prompt out of the vector: send a text as input"
            raise RequestError(f"{label} must be text: {message}", _field_of_label(label))

    def _most_pooled(self, truncate_prompt_tokens: int | None) -> int | None:
        """The number of tokens to which a text is cut off; None for no limit. Raises as `SamplingParams`."""
        if truncate_prompt_tokens is None:
            return None
        SamplingParams(truncate_prompt_tokens=truncate_prompt_tokens)
        limit = self.limits.max_output_tokens(0) - 1
        return limit if truncate_prompt_tokens == -1 else min(limit, truncate_prompt_tokens)

    def encode_chat(
        self,
        messages: list[Message],
        params: SamplingParams | None = None,
        *,
        allow_special_tokens_in_content: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **template_options: Any,
    ) -> tuple[str, list[int]]:
        """Render a conversation with the chat template, and tokenize and check it; raises as `encode`.

        Args:
            allow_special_tokens_in_content, chat_template_kwargs, template_options: as for `LLM.chat`.
        """
        template_options |= template_kwargs(chat_template_kwargs, template_options)
        messages = [with_joined_parts(message, index) for index, message in enumerate(messages)]
        text = self.tokenizer.render_chat(messages, **template_options)
        if self.tokenizer.chat_template is not None:
            given = (name for name, value in template_options.items() if value is not None)
            self.tokenizer.chat_template.check_variables({*given} - {"add_generation_prompt"})
        if allow_special_tokens_in_content:
            text = unmarked(text)
        token_ids = self.encode_text(text, "messages", params, add_special_tokens=False)
        return unmarked(text), token_ids

    def encode_text(
        self, text: str, label: str, params: SamplingParams | None = None, *, add_special_tokens: bool
    ) -> list[int]:
        """Tokenize and check the text of a field; `label` and errors as for `encode`.

        Of a long text only as much is tokenized as is kept, or as proves that it is too long.
        """
        self._check_text(text, label, params)
        kept, too_many = self._most_kept(params), self.limits.max_output_tokens(0)
        num_needed = too_many if kept is None else min(kept, too_many)
        token_ids, is_whole = self.tokenizer.encode_part(
            text, num_needed, from_end=kept is not None, add_special_tokens=add_special_tokens
        )
        return self._checked(token_ids, label, params, is_whole=is_whole)

    def _check_text(self, text: str, label: str, params: SamplingParams | None) -> None:
        """Reject text that is not valid Unicode, or that is too long even if every token were the longest one."""
        param = _field_of_label(label)
        try:
            num_bytes = len(text.encode())
        except UnicodeEncodeError as error:
            raise RequestError(f"{label} is not valid Unicode text: {error.reason}", param) from None
        fewest_tokens = num_bytes // self.tokenizer.max_token_bytes
        is_truncated = params is not None and params.truncate_prompt_tokens is not None
        longest = self.limits.max_model_len * (TRUNCATED_TEXT_FACTOR if is_truncated else 1)
        if fewest_tokens > longest and not (is_truncated and self.tokenizer.can_cut):
            raise self.limits.context_error(
                f"{label} is {num_bytes} bytes long, at least {fewest_tokens} tokens, "
                f"but max_model_len={self.limits.max_model_len}. {self._shorten}",
                param,
                fewest_tokens,
            )

    def make(
        self,
        request_id: str,
        token_ids: list[int],
        params: SamplingParams,
        *,
        arrival_time: float,
        priority: int = 0,
        tenant: str = "",
        cache_salt: str | None = None,
        deadline: float | None = None,
        lora_id: int = 0,
        clamp_max_tokens: bool = False,
        output_len: int | None = None,
        is_offline: bool = False,
    ) -> list[EngineRequest]:
        """Create one request for each of `params.n` answers; the first one is the leader, the others its siblings.

        What depends on the parameters alone is computed once for consecutive calls with the same object.

        Args:
            request_id: the id that the user has chosen. The ids in the core are this id and a number that is unique.
            arrival_time, deadline: in seconds of the engine's clock.
            clamp_max_tokens: whether `max_tokens` is lowered to what fits beside the prompt.
            output_len: the number of output tokens, if it is forced and less than `max_tokens`.
            is_offline: whether logprobs of all tokens are allowed, which would be too many for a response.

        Raises:
            RequestError: a limit is exceeded, or a parameter would have no effect.
        """
        max_tokens = self.max_tokens(params, len(token_ids), clamps=clamp_max_tokens)
        self._check_effects(params, priority, is_offline)
        if self._resolved is None or self._resolved.given is not params:
            self._resolved = self._resolve(params)
        params, stop_token_ids = self._resolved.params, self._resolved.stop_token_ids
        is_forced = params.ignore_eos and not params.stop and not params.stop_token_ids
        self._num_made += 1
        if (seed := params.seed) is None:
            seed = secrets.randbits(SEED_BITS) if self._seed is None else self._seed + self._num_made * REQUEST_STRIDE
        core_id = f"{request_id}~{self._id_prefix}{self._num_made}"
        first = EngineRequest(
            request_id=core_id,
            prompt_token_ids=token_ids,
            sampling_params=params,
            max_tokens=max_tokens,
            stop_token_ids=stop_token_ids,
            seed=seed % (1 << SEED_BITS),
            arrival_time=arrival_time,
            priority=priority,
            output_len=output_len or (max_tokens if is_forced else None),
            tenant=tenant,
            cache_salt=cache_salt,
            deadline=deadline,
            lora_id=lora_id,
        )
        seeds = ((first.seed + index * SIBLING_STRIDE) % (1 << SEED_BITS) for index in range(1, self._resolved.given.n))
        return first.siblings((f"{core_id}.{index}", seed) for index, seed in enumerate(seeds, 1))

    def _resolve(self, params: SamplingParams) -> _ResolvedParams:
        given, stop_token_ids = params, frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_token_ids |= self._eos_token_ids
        self.constraints.compile(params)
        params = self.constraints.resolve(params, stop_token_ids)
        eos = getattr(self.tokenizer, "eos_token_id", None)
        if eos in params.stop_token_ids and not params.ignore_eos:  # As in vLLM, EOS is no `stop_reason`.
            params = replace(params, stop_token_ids=[each for each in params.stop_token_ids if each != eos])
        if params.n > 1 and not params.use_beam_search:
            params = replace(params, n=1)
        return _ResolvedParams(given, params, stop_token_ids)

    def max_tokens(self, params: SamplingParams, num_prompt_tokens: int, *, clamps: bool) -> int:
        """The maximum number of output tokens of a request, which with `clamps` is lowered to what fits beside the
        prompt; raises RequestError if it does not fit."""
        max_tokens = params.max_tokens or self.limits.default_max_tokens(num_prompt_tokens)
        if clamps:
            max_tokens = min(max_tokens, self.limits.max_output_tokens(num_prompt_tokens))
        self._check_lengths(params, num_prompt_tokens, max_tokens)
        return max_tokens

    def _check_lengths(self, params: SamplingParams, num_prompt_tokens: int, max_tokens: int) -> None:
        if max_tokens > (max_output := self.limits.max_output_tokens(num_prompt_tokens)):
            raise self.limits.context_error(
                f"max_tokens={max_tokens} is too large: with {counted(num_prompt_tokens, 'prompt token')} at "
                f"most {max_output} output tokens fit (max_model_len={self.limits.max_model_len}, KV pool of "
                f"{self.limits.max_slots} slots). Lower max_tokens, leave it out, or shorten the prompt.",
                "max_tokens",
                num_prompt_tokens,
            )
        if params.min_tokens > (default := self.limits.default_max_tokens(num_prompt_tokens)):
            raise RequestError(
                f"min_tokens={params.min_tokens} is too large: at most {default} output tokens are possible. Lower it.",
                "min_tokens",
            )

    def _check_effects(self, params: SamplingParams, priority: int, is_offline: bool) -> None:
        if params.has_all_logprobs and not is_offline:
            name = "logprobs" if params.logprobs == -1 else "prompt_logprobs"
            raise RequestError(f"{name} must be between 0 and {MAX_LOGPROBS}, got -1, which only LLM accepts", name)
        if priority and not self.limits.supports_priority:
            raise RequestError(
                f"priority={priority} has no effect under this --scheduling-policy. Leave it out, or choose priority.",
                "priority",
            )
        if abs(priority) > MAX_INTEGER:
            raise RequestError(f"priority must be between -{MAX_INTEGER} and {MAX_INTEGER}, got {priority}", "priority")
        if params.use_beam_search and self.limits.beam_search_problem is not None:
            raise RequestError(
                f"use_beam_search is not supported: {self.limits.beam_search_problem}", "use_beam_search"
            )
        num_ends = len(self._eos_token_ids) + len(params.stop_token_ids)
        if params.use_beam_search and params.n > (limit := self._vocab_size - num_ends):
            raise RequestError(
                f"n must be at most {limit}, the tokens with which a beam can continue, got {params.n}", "n"
            )
        if params.stop and isinstance(self.tokenizer, NoTokenizer):
            raise RequestError("stop requires a tokenizer, which this engine lacks: use stop_token_ids", "stop")

    def _most_kept(self, params: SamplingParams | None) -> int | None:
        """The number of tokens at the end of a prompt that `truncate_prompt_tokens` keeps; None for all of them."""
        if params is None or params.truncate_prompt_tokens is None:
            return None
        if params.truncate_prompt_tokens != -1:
            return params.truncate_prompt_tokens
        beside_answer = self.limits.max_output_tokens(params.max_tokens or 1)
        # If it is less than 1, `max_tokens` is rejected, or lowered.
        return beside_answer if beside_answer >= 1 else self.limits.max_output_tokens(1)

    def _checked(
        self, token_ids: list[int], label: str, params: SamplingParams | None = None, *, is_whole: bool = True
    ) -> list[int]:
        """Check a prompt, of which `token_ids` are all tokens or as many as are needed; returns those that are kept."""
        param = _field_of_label(label)
        if not token_ids:
            raise RequestError(f"{label} is empty: at least one token is required", param)
        longest = self.limits.max_output_tokens(0) - 1
        if (kept := self._most_kept(params)) is not None:
            token_ids = token_ids[-kept:]
        if len(token_ids) > longest:
            most, pool = f"at most {longest} fit with one output token", f", KV pool of {self.limits.max_slots} slots"
            if self.limits.is_pooling:
                most, pool = f"the model computes at most {longest}", ""
            num_tokens, limits = len(token_ids), f"max_model_len={self.limits.max_model_len}{pool}"
            at_least = "" if is_whole else "at least "
            message = f"{label} has {at_least}{num_tokens} tokens, but {most} ({limits}). {self._shorten}"
            raise self.limits.context_error(message, param, num_tokens)
        for token_id in (min(token_ids), max(token_ids)):
            if not 0 <= token_id < self._vocab_size:
                text = self.tokenizer.token_bytes(token_id).decode(errors="replace")
                found = f"{token_id} ({text!r:.100})" if text else f"{token_id}"
                limits = f"outside 0..{self._vocab_size - 1}, the rows of the model's embedding"
                raise RequestError(f"{label} contains a token id {limits}: {found}. Leave it out.", param)
        return token_ids


def _field_of_label(label: str) -> str:
    """The field of a label: "documents" of "documents[3] with query"."""
    return label.partition(" ")[0].partition("[")[0]
