"""LLM: the offline interface, which answers a list of prompts on the thread of the caller."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any, TypeVar, cast

from chairlift.config import EngineConfig
from chairlift.engine.input_processor import EngineRequest, Message, NoTokenizer, Prompt
from chairlift.engine.llm_outputs import BeamSearchOutput, LLMOutput, LogprobDecoder
from chairlift.engine.output_processor import AnswerBuilder, OutputProcessor
from chairlift.engine.pooled_prompts import PooledOptions
from chairlift.engine.pooling import POOLING_PARAMS, check_task, pooled_values
from chairlift.engine.progress import progress_bar
from chairlift.engine.startup.factory import Engine, build_engine
from chairlift.errors import ConfigError, ModelLoadError, RequestError
from chairlift.loading.text.tokenizer import Tokenizer
from chairlift.lora import LoRARequest
from chairlift.outputs import RequestOutput
from chairlift.request import FinishReason
from chairlift.sampling_params import MAX_LOGPROBS, BeamSearchParams, SamplingParams, check_logprobs

AdapterChoice = LoRARequest | str | None
"""A LoRA adapter, the name of a loaded one, or None for the model alone."""

T = TypeVar("T")


class LLM:
    """A model for offline use, whose steps run on the thread of the caller. Calls from several threads run in turn.

    Args:
        model: a folder, a .gguf file, a name on the hub, or None for the default model.
        engine: an existing engine, in place of the model and the options.
        max_logprobs: the largest `logprobs` and `prompt_logprobs` of a prompt; -1 is no limit.
        options: the other fields of EngineConfig, without `pacing_tokens_per_second`.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        engine: Engine | None = None,
        max_logprobs: int = -1,
        **options: Any,
    ) -> None:
        if type(max_logprobs) is not int or not -1 <= max_logprobs <= MAX_LOGPROBS:
            raise ConfigError(f"max_logprobs must be between 0 and {MAX_LOGPROBS}, or -1, got {max_logprobs!r:.100}")
        if engine is not None and (model is not None or options):
            raise ConfigError(f"engine cannot be combined with {', '.join(options) or 'model'}: remove one of them")
        self.engine = engine or _build_engine(EngineConfig.from_options({"model": model, **options}))
        self._processor = OutputProcessor(self.engine.tokenizer)
        self._sampling_defaults = self.engine.facts.sampling_defaults
        self._ids = map("llm-{}".format, itertools.count())
        self._cache_salt: str | None = None
        self._max_logprobs = max_logprobs
        self._lock = threading.RLock()

    @classmethod
    def from_config(cls, config: EngineConfig) -> LLM:
        """Create an LLM from a configuration object."""
        return cls(engine=_build_engine(config))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: AdapterChoice | Sequence[AdapterChoice] = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[LLMOutput]:
        """Generate answers to all prompts, and return them in the order of the prompts.

        Args:
            prompts: a list of prompts, or one prompt: a string, a list of token ids, {"prompt": string} or
                {"prompt_token_ids": list}.
            sampling_params: parameters for all prompts, or a list with one entry for each prompt; None selects
                `get_default_sampling_params()`. A `max_tokens` that does not fit is lowered to what fits.
            use_tqdm: show a progress bar if standard error is a terminal.
            lora_request: the LoRA adapter of all prompts, or a list with one entry for each prompt: the name of a
                loaded adapter, a LoRARequest, whose adapter is loaded if there is none of its name, or None.
            priority: the priority of all prompts, or a list with one for each; the smallest number is first under
                `scheduling_policy="priority"`.

        Raises:
            RequestError: an argument has a wrong type, or a prompt or its parameters are invalid; the message names the
                prompt, and no prompt is run.
                Also raised during the run if a grammar exceeds a limit.
        """
        check_task(self.engine.facts, None)
        encode = self.engine.input_processor.encode
        return self._answer(_prompts(prompts), encode, sampling_params, use_tqdm, lora_request, priority)

    def chat(
        self,
        messages: list[Message] | list[list[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: AdapterChoice | Sequence[AdapterChoice] = None,
        priority: int | Sequence[int] | None = None,
        *,
        allow_special_tokens_in_content: bool = False,
        **template_options: Any,
    ) -> list[LLMOutput]:
        """Generate answers to all conversations; see `generate`.

        Args:
            messages: a list of conversations, or one conversation.
            sampling_params: as for `generate`, but None without a limit of `max_tokens`.
            allow_special_tokens_in_content: text in messages that spells a special token becomes this token; otherwise
                it remains plain text.
            template_options: additional variables, which the chat template must read, each as an argument or together
                as the mapping `chat_template_kwargs`.
        """
        check_task(self.engine.facts, None)
        encode = partial(
            self.engine.input_processor.encode_chat,
            allow_special_tokens_in_content=allow_special_tokens_in_content,
            **template_options,
        )
        if sampling_params is None:
            sampling_params = self._sampling_defaults.params(max_tokens=None)
        return self._answer(_conversations(messages), encode, sampling_params, use_tqdm, lora_request, priority)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: AdapterChoice | Sequence[AdapterChoice] = None,
        use_tqdm: bool = False,
    ) -> list[BeamSearchOutput]:
        """Search the best sequences of each prompt. The search is that of `generate` with `use_beam_search`, and the
        outputs have vLLM's shape. Arguments and errors are those of `generate`."""
        if not isinstance(params, BeamSearchParams):
            raise _type_error("params", "BeamSearchParams", params)
        given = _prompts(prompts)
        outputs = self.generate(given, params.sampling_params(), use_tqdm=use_tqdm, lora_request=lora_request)
        adapters: Sequence[AdapterChoice] = _per_prompt("lora_request", lora_request, len(given))
        decode = partial(self.engine.tokenizer.decode, skip_special_tokens=params.skip_special_tokens)
        return [BeamSearchOutput.of(output, adapter, decode) for output, adapter in zip(outputs, adapters, strict=True)]

    def reset_prefix_cache(self) -> bool:
        """Let later prompts find no cached prefix of earlier ones, also not in `prefix_cache_dir`; returns True.

        The blocks of the earlier prompts are evicted when others need them.
        """
        with self._lock:
            self._cache_salt = next(self._ids)
        return True

    def load_lora_adapter(self, lora_name: str, lora_path: str) -> None:
        """Load a LoRA adapter, whose name is a `lora_request` afterwards.

        Raises:
            RequestError: the name is in use, there is no memory for another adapter, or the adapter is not supported,
                does not fit the model or cannot be read. Nothing has changed.
        """
        with self._lock:
            module = self.engine.adapters.check_new(lora_name, lora_path)
            try:
                self.engine.adapter_loader.load(module)
            except ModelLoadError as error:
                raise RequestError(str(error), "lora_path") from None
            self.engine.adapters.add(module)

    def unload_lora_adapter(self, lora_name: str) -> None:
        """Free the memory of a LoRA adapter. Raises RequestError if it is not loaded."""
        with self._lock:
            lora_id = self.engine.adapters.remove(lora_name).lora_int_id
            self.engine.adapter_loader.unload(lora_id)
            self.engine.adapters.release(lora_id)

    def _adapter_id(self, choice: AdapterChoice) -> int:
        if choice is None:
            return 0
        if isinstance(choice, str):
            return self.engine.adapters.find(choice).lora_int_id
        if not isinstance(choice, LoRARequest):
            raise _type_error("lora_request", "a LoRARequest, the name of a loaded adapter, or None", choice)
        if choice.lora_name not in self.engine.adapters:
            self.load_lora_adapter(choice.lora_name, choice.lora_path)
        loaded = self.engine.adapters.find(choice.lora_name)
        if loaded.lora_path != choice.lora_path:
            raise RequestError(
                f"lora_request: {choice.lora_name!r} is loaded from {loaded.lora_path}, not from {choice.lora_path}: "
                "unload it first, or use another lora_name",
                "lora_request",
            )
        return loaded.lora_int_id

    def embed(
        self, texts: str | Sequence[str], *, truncate_prompt_tokens: int | None = None, use_tqdm: bool = True
    ) -> list[list[float]]:
        """Compute the vectors of texts.

        Args:
            truncate_prompt_tokens: maximum number of tokens of a text, whose end is cut off; -1 is the maximum of the
                model; None raises an error for a text that is too long.

        Raises:
            RequestError: the model computes no vectors, or a text is invalid.
        """
        check_task(self.engine.facts, "embed")
        pairs: list[tuple[str, str | None]] = [(text, None) for text in _texts(texts)]
        return self._pool(pairs, ("text",), truncate_prompt_tokens, use_tqdm)

    def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
    ) -> list[float]:
        """Compute the scores of pairs of texts with a cross-encoder, by default numbers from 0 to 1.

        Args:
            queries: one text for all documents, or one for each.
            truncate_prompt_tokens: as for `embed`; the longer text of a pair is cut off.

        Raises:
            RequestError: the model computes no scores, a text is invalid, or the numbers of texts differ.
        """
        check_task(self.engine.facts, "score")
        texts, others = _texts(queries), _texts(documents)
        if len(texts) == 1:
            texts = texts * len(others)
        if len(texts) != len(others):
            raise RequestError(f"{len(texts)} queries and {len(others)} documents: give one query, or one for each")
        rows = self._pool(
            list(zip(texts, others, strict=True)), ("query", "document"), truncate_prompt_tokens, use_tqdm
        )
        return [score for _number, score in rows]

    def _pool(
        self,
        pairs: list[tuple[str, str | None]],
        labels: tuple[str, ...],
        truncate_prompt_tokens: int | None,
        use_tqdm: bool,
    ) -> list[list[float]]:
        options = PooledOptions(truncate_prompt_tokens)

        def encode(pair: tuple[str, str | None], _params: SamplingParams) -> tuple[None, list[int]]:
            return None, self.engine.input_processor.encode_pooled(*pair, options, labels)

        outputs = self._run(pairs, encode, POOLING_PARAMS, use_tqdm)
        return [pooled_values(output) for output in outputs]

    def get_tokenizer(self) -> Tokenizer | NoTokenizer:
        """The tokenizer of the model, with `encode`, `decode` and `render_chat`."""
        return self.engine.tokenizer

    def _answer(
        self,
        prompts: Sequence[Any],
        encode: Callable[[Any, SamplingParams], tuple[str | None, list[int]]],
        *options: Any,
    ) -> list[LLMOutput]:
        decoder = LogprobDecoder(self.engine.tokenizer)
        return [decoder.output(output) for output in self._run(prompts, encode, *options)]

    def get_default_sampling_params(self) -> SamplingParams:
        """The sampling parameters of prompts without any, from the model's generation configuration.

        If it has `max_new_tokens`, then `max_tokens` is None, and outputs end at this number or where the context ends.
        """
        defaults = self._sampling_defaults
        return defaults.params() if defaults.max_new_tokens is None else defaults.params(max_tokens=None)

    def close(self) -> None:
        """Close the event log and the trace file, if there are any."""
        with self._lock:
            self.engine.close()

    def _run(
        self,
        prompts: Sequence[Any],
        encode: Callable[[Any, SamplingParams], tuple[str | None, list[int]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        lora_request: AdapterChoice | Sequence[AdapterChoice] = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        if not isinstance(use_tqdm, bool):
            raise _type_error("use_tqdm", "True or False", use_tqdm)
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        _check_params(sampling_params)
        all_params = _not_streamed(_per_prompt("sampling_params", sampling_params, len(prompts)))
        choices: Sequence[AdapterChoice] = _per_prompt("lora_request", lora_request, len(prompts))
        priorities = _priorities(priority, len(prompts))
        vocab_size = self.engine.facts.model_config.vocab_size if any(p.has_all_logprobs for p in all_params) else None
        with self._lock:
            adapters = [self._adapter_id(choice) for choice in choices]
            ids = [next(self._ids) for _ in prompts]
            indexes: dict[str, int] = {}
            num_logprobs = 0
            try:
                for index, (prompt, params) in enumerate(zip(prompts, all_params, strict=True)):
                    with _naming_prompt(index):
                        _check_max_logprobs(params, self._max_logprobs)
                        self.engine.input_processor.constraints.compile(params)
                        text, token_ids = encode(prompt, params)
                        if vocab_size is not None:
                            num_logprobs += self.engine.facts.limits.num_logprobs(params, len(token_ids), vocab_size)
                            check_logprobs(num_logprobs)
                        requests = self._make(ids[index], token_ids, params, adapters[index], priorities[index])
                        self._processor.add(ids[index], text, requests)
                        indexes |= {request.request_id: index for request in requests}
                        for request in requests:
                            self.engine.core.add(request.to_request())
                answers = self._step_until_done(ids, indexes, use_tqdm)
            finally:
                for core_id in self._processor.remove(indexes):
                    self.engine.core.abort(core_id)
            return [answers[request_id].build() for request_id in ids]

    def _make(
        self, request_id: str, token_ids: list[int], params: SamplingParams, lora_id: int, priority: int
    ) -> list[EngineRequest]:
        return self.engine.input_processor.make(
            request_id,
            token_ids,
            params,
            arrival_time=self.engine.core.now(),
            priority=priority,
            cache_salt=self._cache_salt,
            lora_id=lora_id,
            clamp_max_tokens=True,
            is_offline=True,
        )

    def _step_until_done(self, ids: list[str], indexes: dict[str, int], use_tqdm: bool) -> dict[str, AnswerBuilder]:
        core, answers = self.engine.core, {request_id: AnswerBuilder() for request_id in ids}
        with (
            _defer_interrupts() as check_interrupt,
            progress_bar("answers", len(ids), "tokens", is_shown=use_tqdm) as advance,
        ):
            num_unfinished, num_tokens = len(ids), 0
            while num_unfinished:
                outputs = core.step()
                check_interrupt()
                num_tokens += sum(len(output.new_token_ids) for output in outputs)
                updates, stopped = self._processor.process(outputs, core.now())
                for request_id in stopped:
                    core.abort(request_id, FinishReason.STOP)
                num_finished = 0
                for leader_id, update in updates:
                    if not isinstance(update, RequestOutput):
                        with _naming_prompt(indexes[leader_id]):
                            raise update
                    answers[update.request_id].add(update)
                    num_finished += update.finished
                num_unfinished -= num_finished
                advance(num_finished, tokens=num_tokens)
        return answers


def _build_engine(config: EngineConfig) -> Engine:
    if config.pacing_tokens_per_second is not None:
        raise ConfigError(
            f"pacing_tokens_per_second={config.pacing_tokens_per_second:g} has no effect in LLM, whose answers are not "
            "streamed: remove it, or use AsyncLLM"
        )
    return build_engine(config)


@contextmanager
def _defer_interrupts() -> Iterator[Callable[[], None]]:
    """Defer KeyboardInterrupt to the end of a step, because scheduler and device would disagree in the middle of one.

    The yielded function raises a deferred interrupt. A second interrupt is raised at once.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    interrupts: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        interrupts.append(number)
        if len(interrupts) > 1:
            signal.default_int_handler(number, frame)

    def check() -> None:
        if interrupts:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _naming_prompt(index: int) -> Iterator[None]:
    """Begin the message of a RequestError with the index of the prompt."""
    try:
        yield
    except RequestError as error:
        error.args = (f"prompt {index}: {error}",)
        raise


def _type_error(name: str, accepted: str, value: object) -> RequestError:
    return RequestError(f"{name} must be {accepted}, got {type(value).__name__}: {value!r:.100}", name)


def _prompts(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """The list of prompts; a string or a list of token ids is a single prompt."""
    if isinstance(prompts, Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        forms = 'a string, a list of token ids, {"prompt": string}, {"prompt_token_ids": list}, or a list of those'
        raise _type_error("prompts", forms, prompts)
    single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
    return cast("Sequence[Prompt]", [prompts] if single else prompts)


def _conversations(messages: list[Message] | list[list[Message]]) -> list[list[Message]]:
    """The list of conversations; a list of messages is a single conversation."""
    if not isinstance(messages, list | tuple):
        raise _type_error("messages", "a list of messages (dicts with role and content), or a list of those", messages)
    single = bool(messages) and isinstance(messages[0], dict)
    conversations = cast("list[list[Message]]", [messages] if single else messages)
    for index, conversation in enumerate(conversations):
        if not isinstance(conversation, list | tuple):
            raise _type_error(f"messages[{index}]", "a list of messages", conversation)
        for number, message in enumerate(conversation):
            if not isinstance(message, dict):
                name = f"messages[{number}]" if single else f"messages[{index}][{number}]"
                raise _type_error(name, "a message (a dict with role and content)", message)
    return conversations


def _per_prompt(name: str, value: T | Sequence[T], count: int) -> Sequence[T]:
    """The value of each prompt: one value applies to all prompts."""
    if not isinstance(value, list | tuple):
        return [cast("T", value)] * count
    if len(value) != count:
        raise RequestError(f"{name} has {len(value)} entries for {count} prompts: pass one, or one per prompt", name)
    return value


def _check_max_logprobs(params: SamplingParams, limit: int) -> None:
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        if limit != -1 and value is not None and not 0 <= value <= limit:
            raise RequestError(
                f"{name}={value} exceeds max_logprobs={limit} of this LLM: lower it, or raise the limit", name
            )


def _priorities(priority: int | Sequence[int] | None, count: int) -> Sequence[int]:
    priorities = _per_prompt("priority", 0 if priority is None else priority, count)
    for each in priorities:
        if type(each) is not int:
            raise _type_error("priority", "an integer, a list with one for each prompt, or None", each)
    return priorities


def _not_streamed(all_params: Sequence[SamplingParams]) -> list[SamplingParams]:
    """The parameters of each prompt without streaming. Prompts with one object also share the new one."""
    distinct = {id(params): params for params in all_params}
    made = {key: replace(params, is_streamed=False) for key, params in distinct.items()}
    return [made[id(params)] for params in all_params]


def _check_params(params: object) -> None:
    for index, each in enumerate(params) if isinstance(params, list | tuple) else ():
        if not isinstance(each, SamplingParams):
            raise _type_error(f"sampling_params[{index}]", "SamplingParams", each)
    if not isinstance(params, SamplingParams | list | tuple):
        raise _type_error("sampling_params", "SamplingParams, a list of those, or None", params)


def _texts(texts: str | Sequence[str]) -> list[str]:
    if not isinstance(texts, Iterable) or isinstance(texts, bytes):
        raise _type_error("texts", "a string or a list of strings", texts)
    found = [texts] if isinstance(texts, str) else list(texts)
    if not all(isinstance(text, str) for text in found):
        raise _type_error("texts", "strings", next(text for text in found if not isinstance(text, str)))
    return found
