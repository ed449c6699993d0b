"""The configuration of an engine and of its scheduler. Both are checked when they are created."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chairlift.errors import ConfigError
from chairlift.speculative_config import SpeculativeConfig
from chairlift.step_time import RowTime, StepTime
from chairlift.system.output_files import check_writable

SCHEDULING_POLICIES = ("fcfs", "priority", "fair")
KERNEL_SETS = ("auto", "native", "torch", "reference")
QUANTIZATIONS = ("int8", "q8_0", "q4_0", "q4_1")
KV_CACHE_DTYPES = ("auto", "bfloat16", "float32", "int8")
BATCHINGS = ("continuous", "static")
STATIC_RUN_TO = ("batch", "global")
KV_POLICIES = ("paged", "exact", "max", "pow2", "oracle")
KV_ARENAS = ("buddy", "first-fit")
DTYPES = ("auto", "float32", "bfloat16", "float16")
LOAD_FORMATS = ("auto", "dummy")

DEFAULT_BLOCK_SIZE = 16
DEFAULT_MAX_NUM_SEQS = 64
DEFAULT_MAX_NUM_BATCHED_TOKENS = 512
DEFAULT_STATIC_BATCH_SIZE = 8
DEFAULT_DISK_BYTES = 10 << 30
DEFAULT_MAX_LORA_RANK = 16


def _at_least(name: str, value: int, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} must be an integer, got {value!r}")
    if value < low:
        raise ConfigError(f"{name} must be at least {low}, got {value}")


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{name} must be one of {', '.join(known)}, got {value!r}")


def parse_weights(text: str, rule: str) -> dict[str, float]:
    """Parse "name=weight,name=weight" to a positive weight for each name.

    Args:
        rule: beginning of the error message, which states the form of the text.

    Raises:
        ConfigError: the text has another form, a weight is not positive, or a name occurs twice.
    """
    weights: dict[str, float] = {}
    for part in text.split(","):
        name, _equals, number = part.partition("=")
        try:
            weight = float(number)
        except ValueError:
            weight = math.nan
        if not name or name in weights or not 0 < weight < math.inf:
            raise ConfigError(f"{rule}, got {part!r} in {text!r}")
        weights[name] = weight
    return weights


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The limits and policies of a scheduler: the fields of `EngineConfig` with these names, without open choices.

    Attributes:
        step_time: limits chunks of prompts by the estimated time of a step; None limits them by the token budget only.
        speculative_config: how draft tokens are proposed; None disables speculative decoding.
        row_time: the estimated time of steps, by which draft tokens are limited to those that pay; None does not limit
            them.
        draft_row_time: the estimated time in which a draft model proposes one token for each of its rows.
        is_pooling: requests generate no tokens, and end when their prompt is computed.
        enable_chunked_prefill: prompts may be computed in several steps; otherwise a prompt waits until the rest of the
            token budget of a step is enough for all of it.
    """

    max_model_len: int
    max_num_seqs: int = DEFAULT_MAX_NUM_SEQS
    max_num_batched_tokens: int = DEFAULT_MAX_NUM_BATCHED_TOKENS
    scheduling_policy: str = "fcfs"
    batching: str = "continuous"
    static_batch_size: int = DEFAULT_STATIC_BATCH_SIZE
    static_run_to: str = "batch"
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    step_time: StepTime | None = None
    speculative_config: SpeculativeConfig | None = None
    row_time: RowTime | None = None
    draft_row_time: RowTime | None = None
    is_pooling: bool = False
    enable_chunked_prefill: bool = True

    @property
    def max_logit_rows(self) -> int:
        """Maximum number of rows of a step whose logits are computed for sampling."""
        speculative = self.speculative_config
        rows = 1 if speculative is None else 1 + speculative.num_speculative_tokens
        return min(max(self.max_num_seqs, rows), self.max_num_batched_tokens)

    def __post_init__(self) -> None:
        _at_least("max_model_len", self.max_model_len, 2)
        _at_least("max_num_seqs", self.max_num_seqs, 1)
        _at_least("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        _one_of("scheduling_policy", self.scheduling_policy, SCHEDULING_POLICIES)
        _one_of("batching", self.batching, BATCHINGS)
        _one_of("static_run_to", self.static_run_to, STATIC_RUN_TO)
        _at_least("static_batch_size", self.static_batch_size, 1)
        if self.tenant_weights and self.scheduling_policy != "fair":
            raise ConfigError(
                f"tenant_weights need scheduling_policy=fair, got scheduling_policy={self.scheduling_policy}: "
                f"set --scheduling-policy fair, or remove them"
            )
        if self.batching == "static" and self.static_batch_size > self.max_num_seqs:
            raise ConfigError(
                f"static_batch_size={self.static_batch_size} must be at most max_num_seqs={self.max_num_seqs}: "
                f"reduce static_batch_size, or increase max_num_seqs"
            )
        if self.speculative_config is not None and self.static_run_to == "global":
            raise ConfigError(
                "speculative_config cannot be combined with static_run_to=global, which decodes all requests for the "
                "same number of steps: remove one of them"
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} must be at least max_model_len="
                f"{self.max_model_len}, because this model computes a text in one step: increase "
                f"max_num_batched_tokens, or reduce max_model_len"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} must be at least max_num_seqs="
                f"{self.max_num_seqs}, so that one step can decode all requests: increase max_num_batched_tokens, or "
                f"reduce max_num_seqs"
            )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The options of an engine. For None the engine chooses a value and logs it.

    Attributes:
        model: a folder with config.json and safetensors, a .gguf file, the name of a packaged model (see
            `chairlift pull --help`), or a name on the Hugging Face hub; None is the default model.
        accept_terms: accept the terms of use of a packaged model, which its first download may require.
        device: "cpu" or "cuda".
        dtype: the data type of weights and activations; "auto" is float32 on the CPU, where native kernels keep weights
            in the format of the file, and the type of the file on other devices.
        kernels: the kernel set: "native", "torch", or "reference", which defines both; "auto" is "native" on the CPU if
            the extension can be loaded, otherwise "torch".
        quantization: the format to which native kernels quantize all linear layers: "int8" with a scale for each
            output, or "q8_0", "q4_0" and "q4_1" of GGUF; None keeps the format of the file.
        kv_cache_dtype: the data type of K and V: "auto" is bfloat16 with native kernels, otherwise `dtype`; "int8" has
            a scale for each token and head.
        max_model_len: maximum number of prompt and output tokens of one request; None is the smaller of the context of
            the model and the size of the pool.
        max_num_seqs: maximum number of running requests (seats).
        max_num_batched_tokens: the token budget of a step, at least max_num_seqs. None is
            DEFAULT_MAX_NUM_BATCHED_TOKENS, of which native kernels with continuous batching compute as many as their
            measured speed allows in the time of a step.
        scheduling_policy: "fcfs", "priority" (smallest number first) or "fair" (the tenant with the least service
            first).
        tenant_weights: relative shares of tenants (API keys) under the fair policy, as "name=weight,name=weight"; 1 for
            all other tenants.
        batching: "continuous" chooses the batch again at every step; "static" closes it when it starts, and returns its
            outputs when its last member has finished.
        static_batch_size: maximum number of requests in a static batch; None is the smaller of 8 and max_num_seqs.
        static_run_to: "batch" (None) decodes a static batch to its longest output, "global" to the longest output of
            all requests, whose lengths must be forced.
        block_size: number of KV slots in a block.
        kv_cache_memory_bytes: bytes for K and V; None is a share of the free memory.
        num_kv_blocks: the size of the pool in blocks, instead of kv_cache_memory_bytes.
        kv: "paged" allocates blocks on demand. The others reserve slots at admission: "exact" for prompt and
            max_tokens, "max" for max_model_len, "pow2" and "oracle" for the true output length, which must be forced.
        kv_arena: the allocator of reservations: "buddy" or "first-fit".
        disable_hybrid_kv_cache_manager: keep K and V of layers with a sliding window as long as those of other layers,
            instead of releasing the blocks that left the window. Reservations always keep them.
        enable_prefix_caching: None enables the prefix cache for "paged"; reservations have none.
        enable_kv_cache_events: emit the changes of the prefix cache as events.
        prefix_cache_dir: a folder in which the blocks of finished requests are kept, also after a restart; None keeps
            them in memory only.
        prefix_cache_disk_bytes: maximum size of the blocks of this model in prefix_cache_dir.
        load_format: "auto" reads the weights of the files; "dummy" creates random weights from config.json alone.
        skip_tokenizer_init: load no tokenizer: prompts are token ids, and outputs have no text.
        classifier_from_token: two tokens, such as ("no", "yes"): the model scores pairs of texts by the difference of
            their logits after the prompt of Qwen3-Reranker, instead of generating text; None generates text.
        generation_config: the source of sampling defaults: "auto" is generation_config.json or the GGUF file of the
            model, "vllm" is none, and any other value is a folder with generation_config.json.
        override_generation_config: sampling defaults that replace those of generation_config, by name.
        speculative_config: speculative decoding, as the fields of `SpeculativeConfig`; None disables it.
        lora_modules: the path of each LoRA adapter that is loaded at the start, by its name; None for none.
        max_loras: the number of LoRA adapters for which memory is allocated; None is the number of `lora_modules`. With
            0 none can be loaded.
        max_lora_rank: the largest rank of a LoRA adapter.
        seed: the seed of the random streams of requests without a seed.
        num_threads: number of CPU threads; None is the number of physical cores that this process and
            its control group may use.
        event_log: a file to which every event is written as a JSON line.
        record_trace: a file to which every finished request is written as a JSON line with lengths, times and keyed
            hashes of the blocks of its prompt: a workload that can be replayed, without contents.
    """

    model: str | None = None
    accept_terms: bool = False
    device: str = "cpu"
    dtype: str = "auto"
    kernels: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = DEFAULT_MAX_NUM_SEQS
    max_num_batched_tokens: int | None = None
    scheduling_policy: str = "fcfs"
    tenant_weights: str | None = None
    batching: str = "continuous"
    static_batch_size: int | None = None
    static_run_to: str | None = None
    block_size: int = DEFAULT_BLOCK_SIZE
    kv_cache_memory_bytes: int | None = None
    num_kv_blocks: int | None = None
    kv: str = "paged"
    kv_arena: str = "buddy"
    enable_prefix_caching: bool | None = None
    enable_kv_cache_events: bool = False
    prefix_cache_dir: Path | None = None
    prefix_cache_disk_bytes: int = DEFAULT_DISK_BYTES
    disable_hybrid_kv_cache_manager: bool = False
    load_format: str = "auto"
    skip_tokenizer_init: bool = False
    classifier_from_token: Sequence[str] | None = None
    generation_config: str = "auto"
    override_generation_config: dict[str, Any] | None = None
    speculative_config: SpeculativeConfig | Mapping[str, Any] | None = None
    lora_modules: Mapping[str, str] | None = None
    max_loras: int | None = None
    max_lora_rank: int = DEFAULT_MAX_LORA_RANK
    seed: int | None = None
    num_threads: int | None = None
    event_log: Path | None = None
    record_trace: Path | None = None

    def __post_init__(self) -> None:
        if self.device != "cpu" and self.device.split(":")[0] != "cuda":
            raise ConfigError(f"device must be cpu or cuda, got {self.device!r}")
        for name in ("event_log", "record_trace", "prefix_cache_dir"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, Path(getattr(self, name)))
        if self.event_log is not None and self.event_log == self.record_trace:
            raise ConfigError(f"event_log and record_trace must be different files, got {self.event_log} for both")
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("load_format", self.load_format, LOAD_FORMATS)
        self._check_kernels()
        if self.speculative_config is not None and not isinstance(self.speculative_config, SpeculativeConfig):
            object.__setattr__(self, "speculative_config", SpeculativeConfig.from_mapping(self.speculative_config))
        if self.speculative_config is not None and self.kv == "paged" and self.block_size == 1:
            raise ConfigError(
                "speculative_config needs a block_size of at least 2 with kv=paged, because draft tokens are written "
                "to the rest of a block; got 1"
            )
        _one_of("batching", self.batching, BATCHINGS)
        for name in ("static_batch_size", "static_run_to"):
            if self.batching != "static" and getattr(self, name) is not None:
                raise ConfigError(f"{name}={getattr(self, name)} needs batching=static: remove {name}")
        _one_of("kv", self.kv, KV_POLICIES)
        _one_of("kv_arena", self.kv_arena, KV_ARENAS)
        if self.kv != "paged" and self.enable_prefix_caching:
            raise ConfigError(f"enable_prefix_caching needs kv=paged, got kv={self.kv}: remove enable_prefix_caching")
        if self.kv == "paged" and self.kv_arena != "buddy":
            raise ConfigError(f"kv_arena={self.kv_arena} needs a reservation policy, got kv=paged: remove kv_arena")
        _at_least("block_size", self.block_size, 1)
        _at_least("prefix_cache_disk_bytes", self.prefix_cache_disk_bytes, 1)
        if self.enable_kv_cache_events and not self.has_prefix_cache:
            raise ConfigError("enable_kv_cache_events needs the prefix cache: set kv=paged and enable_prefix_caching")
        if self.prefix_cache_dir is not None:
            self._check_disk_cache()
        for name in ("num_kv_blocks", "kv_cache_memory_bytes", "num_threads", "static_batch_size"):
            value = getattr(self, name)
            if value is not None:
                _at_least(name, value, 1)
        if self.kv_cache_memory_bytes is not None and self.num_kv_blocks is not None:
            raise ConfigError(
                "kv_cache_memory_bytes and num_kv_blocks both set the size of the pool: remove one of them"
            )
        self._check_lora()
        self._check_classifier()
        self.scheduler_config(2 if self.max_model_len is None else self.max_model_len)

    def _check_disk_cache(self) -> None:
        if not self.has_prefix_cache:
            raise ConfigError("prefix_cache_dir needs the prefix cache: set kv=paged and enable_prefix_caching")
        if self.device != "cpu":
            raise ConfigError(f"prefix_cache_dir needs device=cpu, got device={self.device}: remove prefix_cache_dir")
        if self.speculative is not None and self.speculative.model is not None:
            raise ConfigError(
                "prefix_cache_dir cannot be combined with a draft model, whose K and V are not kept: remove one of them"
            )

    def _check_kernels(self) -> None:
        """Check the kernel set. Only native kernels quantize weights, and torch kernels have no int8 KV memory."""
        _one_of("kernels", self.kernels, KERNEL_SETS)
        _one_of("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        if self.quantization is not None:
            _one_of("quantization", self.quantization, QUANTIZATIONS)
        conflict = self.native_conflict
        if conflict is None:
            return
        if self.kernels == "native":
            raise ConfigError(f"kernels=native cannot be combined with {conflict}: remove one of them")
        if self.quantization is not None:
            option = f"quantization={self.quantization}"
        elif self.kv_cache_dtype == "int8" and self.kernels != "reference":
            option = "kv_cache_dtype=int8"
        else:
            return
        raise ConfigError(f"{option} needs native kernels and cannot be combined with {conflict}: remove one of them")

    def _check_classifier(self) -> None:
        if (tokens := self.classifier_from_token) is None:
            return
        if isinstance(tokens, str) or len(tokens) != 2 or not all(isinstance(each, str) and each for each in tokens):
            raise ConfigError(f'classifier_from_token must be two tokens, such as ["no", "yes"], got {tokens!r:.100}')
        if self.batching != "continuous" or self.speculative_config is not None or self.num_loras:
            raise ConfigError(
                "classifier_from_token cannot be combined with batching=static, speculative_config or lora_modules: "
                "remove them"
            )
        object.__setattr__(self, "classifier_from_token", tuple(tokens))

    def _check_lora(self) -> None:
        _at_least("max_lora_rank", self.max_lora_rank, 1)
        if self.max_loras is not None:
            _at_least("max_loras", self.max_loras, 0)
        modules = self.lora_modules or {}
        if not all(isinstance(text, str) and text for item in modules.items() for text in item):
            raise ConfigError(f"lora_modules must have a path for each name, got {modules!r:.200}")
        if len(modules) > self.num_loras:
            raise ConfigError(
                f"lora_modules has {len(modules)} adapters, but max_loras={self.max_loras}: increase max_loras"
            )

    @property
    def num_loras(self) -> int:
        """The number of LoRA adapters for which memory is allocated."""
        return len(self.lora_modules or {}) if self.max_loras is None else self.max_loras

    @property
    def native_conflict(self) -> str | None:
        """The option that native kernels do not support; None if they can be used."""
        if self.kernels not in ("auto", "native"):
            return f"kernels={self.kernels}"
        if self.device != "cpu":
            return f"device={self.device}"
        return None if self.dtype in ("auto", "float32") else f"dtype={self.dtype}"

    @property
    def speculative(self) -> SpeculativeConfig | None:
        """`speculative_config` as a record."""
        assert self.speculative_config is None or isinstance(self.speculative_config, SpeculativeConfig)
        return self.speculative_config

    @property
    def has_prefix_cache(self) -> bool:
        return self.kv == "paged" and self.enable_prefix_caching is not False

    @property
    def largest_token_budget(self) -> int:
        """The token budget: `max_num_batched_tokens`, or its default."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return max(DEFAULT_MAX_NUM_BATCHED_TOKENS, self.max_num_seqs)

    def check_files(self) -> None:
        """Check that `event_log` and `record_trace` can be written, and raise ConfigError if not."""
        for name, path in (("event_log", self.event_log), ("record_trace", self.record_trace)):
            if path is not None:
                check_writable(name, path)

    def scheduler_config(
        self,
        max_model_len: int,
        token_budget: int | None = None,
        step_time: StepTime | None = None,
        row_time: RowTime | None = None,
        draft_row_time: RowTime | None = None,
    ) -> SchedulerConfig:
        """The configuration of the scheduler.

        Args:
            token_budget: the token budget if `max_num_batched_tokens` is None; None is the default.
            step_time: the measured time of steps, used if `max_num_batched_tokens` is None.
            row_time: the measured time of steps by their number of sampled rows; draft_row_time: of the draft model.
        """
        if self.max_num_batched_tokens is not None:
            step_time = None
        if self.max_num_batched_tokens is not None or token_budget is None:
            token_budget = self.largest_token_budget
        rule = "tenant_weights must be name=weight pairs such as a=1,b=2.5 with weights above 0"
        return SchedulerConfig(
            max_model_len=max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=token_budget,
            scheduling_policy=self.scheduling_policy,
            batching=self.batching,
            static_batch_size=self.static_batch_size or min(DEFAULT_STATIC_BATCH_SIZE, self.max_num_seqs),
            static_run_to=self.static_run_to or "batch",
            tenant_weights=parse_weights(self.tenant_weights, rule) if self.tenant_weights else {},
            step_time=step_time,
            speculative_config=self.speculative,
            row_time=row_time,
            draft_row_time=draft_row_time,
        )
