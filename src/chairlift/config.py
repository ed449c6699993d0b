"""Configuration: frozen, parsed once, handed out in pieces."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from chairlift.errors import ConfigError
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

DEFAULT_BLOCK_SIZE = 16
DEFAULT_MAX_NUM_SEQS = 64
DEFAULT_MAX_NUM_BATCHED_TOKENS = 512
DEFAULT_STATIC_BATCH_SIZE = 8


def _at_least(name: str, value: int, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} must be an integer, got {value!r}")
    if value < low:
        raise ConfigError(f"{name} must be at least {low}, got {value}")


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{name} must be one of {', '.join(known)}, got {value!r}")


def _parse_weights(text: str | None) -> dict[str, float]:
    """The weights in "name=weight,name=weight"."""
    weights: dict[str, float] = {}
    for part in text.split(",") if text else ():
        name, _equals, number = part.partition("=")
        try:
            weight = float(number)
        except ValueError:
            weight = math.nan
        if not name or name in weights or not 0 < weight < math.inf:
            raise ConfigError(f"tenant_weights must be like a=1,b=2.5, with weights > 0, got {part!r} in {text!r}")
        weights[name] = weight
    return weights


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The limits of a batch.

    Attributes:
        max_num_seqs: maximum number of running requests (seats).
        max_num_batched_tokens: tokens computed in one step (the token budget).
        max_model_len: prompt and output tokens of one request.
        scheduling_policy: "fcfs", "priority" (smaller first, then first come) or "fair" (the tenant that had least
            service first).
        tenant_weights: tenant -> its share in relation to others under the fair policy; 1 for those not named.
        batching: "continuous" or "static".
        static_batch_size: members of a static batch.
        static_run_to: a static batch is decoded to its own longest output ("batch") or to that of all requests
            ("global").
    """

    max_model_len: int
    max_num_seqs: int = DEFAULT_MAX_NUM_SEQS
    max_num_batched_tokens: int = DEFAULT_MAX_NUM_BATCHED_TOKENS
    scheduling_policy: str = "fcfs"
    batching: str = "continuous"
    static_batch_size: int = DEFAULT_STATIC_BATCH_SIZE
    static_run_to: str = "batch"
    tenant_weights: Mapping[str, float] = field(default_factory=dict)

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
                f"tenant_weights have no effect under scheduling_policy={self.scheduling_policy}: choose "
                f"--scheduling-policy fair, or leave them out"
            )
        if self.batching == "static" and self.static_batch_size > self.max_num_seqs:
            raise ConfigError(
                f"static_batch_size={self.static_batch_size} is more than max_num_seqs={self.max_num_seqs} seats: "
                f"lower the one or raise the other."
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is less than max_num_seqs={self.max_num_seqs}: "
                f"a full batch of decodes would not fit one step. Raise the one or lower the other."
            )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What a user can choose about an engine; None lets the engine choose, and it prints what it chose.

    Attributes:
        model: a folder with config.json and safetensors, a .gguf file, a name on the hub; None is the default model.
        device: "cpu" or "cuda".
        dtype: of weights and activations; "auto" is float32 on the CPU, where native kernels keep weights as the file
            has them, and the file's type elsewhere.
        kernels: the kernel set: "native", "torch", or "reference", the slow definition of both; "auto" is "native" on
            the CPU where the extension can be loaded, else "torch".
        quantization: the format that native kernels bring all matrices to: "int8" has a scale an output, "q8_0", "q4_0"
            and "q4_1" are those of GGUF; None leaves each as in the file.
        kv_cache_dtype: of K and V in memory: "auto" is bfloat16 with native kernels, else `dtype`; "int8" has a scale
            for each token and head.
        max_model_len: the smaller of the model's context and the pool, if None.
        max_num_seqs: maximum number of running requests (seats).
        max_num_batched_tokens: the token budget of a step. None: DEFAULT_MAX_NUM_BATCHED_TOKENS, or with native
            kernels and continuous batching as much less as keeps a step short on this machine; max_num_seqs at least.
        kv_cache_memory: bytes for K and V; None is a share of what is free.
        num_kv_blocks: the pool's size in blocks, instead of kv_cache_memory.
        tenant_weights: shares of tenants (API keys) in relation to one another under the fair policy, as
            "name=weight,name=weight"; 1 for those not named.
        batching: "continuous" chooses the batch anew at every step; "static" closes it when it starts, and answers when
            its last member is done.
        static_batch_size: members of a static batch at most; the smaller of 8 and max_num_seqs if None.
        static_run_to: "batch", if None, or "global": every static batch is decoded to the longest output of all
            requests, which therefore must be forced.
        kv: when a request gets its memory: "paged" takes blocks on demand; the others reserve at admission: "exact"
            prompt and max_tokens, "max" max_model_len, "pow2" and "oracle" by the true output length, known only where
            it is forced.
        kv_arena: where reservations come from: "buddy" or "first-fit".
        enable_prefix_caching: None is on for "paged" and off for reservations, which have none.
        random_weights: build the model from its config alone, with random parameters.
        skip_tokenizer_init: load no tokenizer: prompts are token ids, answers have no text.
        seed: of the streams of requests that bring no seed of their own.
        num_threads: of the CPU; None is all that this process may run on and has a control group's time for.
        event_log: a file that receives every event as a JSON line.
        record_trace: a file that receives every request that ended as a JSON line of lengths, times and keyed hashes of
            its prompt's blocks: a workload to be served again, without its contents.
    """

    model: str | None = None
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
    kv_cache_memory: int | None = None
    num_kv_blocks: int | None = None
    kv: str = "paged"
    kv_arena: str = "buddy"
    enable_prefix_caching: bool | None = None
    random_weights: bool = False
    skip_tokenizer_init: bool = False
    seed: int | None = None
    num_threads: int | None = None
    event_log: Path | None = None
    record_trace: Path | None = None

    def __post_init__(self) -> None:
        if self.device != "cpu" and self.device.split(":")[0] != "cuda":
            raise ConfigError(f"device must be cpu or cuda, got {self.device!r}")
        for name in ("event_log", "record_trace"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, Path(getattr(self, name)))
        if self.event_log is not None and self.event_log == self.record_trace:
            raise ConfigError(f"event_log and record_trace are both {self.event_log}: give each a file of its own")
        _one_of("dtype", self.dtype, DTYPES)
        self._check_kernels()
        _one_of("batching", self.batching, BATCHINGS)
        for name in ("static_batch_size", "static_run_to"):
            if self.batching != "static" and getattr(self, name) is not None:
                raise ConfigError(f"{name}={getattr(self, name)} is for batching=static: leave it out")
        _one_of("kv", self.kv, KV_POLICIES)
        _one_of("kv_arena", self.kv_arena, KV_ARENAS)
        if self.kv != "paged" and self.enable_prefix_caching:
            raise ConfigError(f"kv={self.kv} reserves and has no prefix cache: leave out enable_prefix_caching")
        if self.kv == "paged" and self.kv_arena != "buddy":
            raise ConfigError(f"kv_arena={self.kv_arena} is for reservations, and kv=paged has none: leave it out")
        _at_least("block_size", self.block_size, 1)
        for name in ("num_kv_blocks", "kv_cache_memory", "num_threads", "static_batch_size"):
            value = getattr(self, name)
            if value is not None:
                _at_least(name, value, 1)
        if self.kv_cache_memory is not None and self.num_kv_blocks is not None:
            raise ConfigError("kv_cache_memory and num_kv_blocks both size the pool: give one of them")
        self.scheduler_config(2 if self.max_model_len is None else self.max_model_len)

    def _check_kernels(self) -> None:
        """Native kernels are for the CPU and compute in float32; they alone quantize, and torch keeps no int8."""
        _one_of("kernels", self.kernels, KERNEL_SETS)
        _one_of("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        if self.quantization is not None:
            _one_of("quantization", self.quantization, QUANTIZATIONS)
        why = self.native_conflict
        if why is None:
            return
        if self.kernels == "native":
            raise ConfigError(f"kernels=native cannot be combined with {why}: leave one of them out")
        if self.quantization is not None:
            raise ConfigError(f"quantization={self.quantization} is for native kernels, not for {why}: leave one out")
        if self.kv_cache_dtype == "int8" and self.kernels != "reference":
            raise ConfigError(f"kv_cache_dtype=int8 is for native kernels, not for {why}: leave one out")

    @property
    def native_conflict(self) -> str | None:
        """The option that rules native kernels out; None: they may be used."""
        if self.kernels not in ("auto", "native"):
            return f"kernels={self.kernels}"
        if self.device != "cpu":
            return f"device={self.device}"
        return None if self.dtype in ("auto", "float32") else f"dtype={self.dtype}"

    @property
    def has_prefix_cache(self) -> bool:
        return self.kv == "paged" and self.enable_prefix_caching is not False

    @property
    def largest_token_budget(self) -> int:
        """`max_num_batched_tokens`, or the most that an engine chooses for it."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return max(DEFAULT_MAX_NUM_BATCHED_TOKENS, self.max_num_seqs)

    def check_files(self) -> None:
        """Raises ConfigError if `event_log` or `record_trace` cannot be written."""
        for name, path in (("event_log", self.event_log), ("record_trace", self.record_trace)):
            if path is not None:
                check_writable(name, path)

    def scheduler_config(self, max_model_len: int, token_budget: int | None = None) -> SchedulerConfig:
        """The scheduler's piece, once the length is settled.

        Args:
            token_budget: where the user gave none; None: the largest.
        """
        if self.max_num_batched_tokens is not None or token_budget is None:
            token_budget = self.largest_token_budget
        return SchedulerConfig(
            max_model_len=max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=token_budget,
            scheduling_policy=self.scheduling_policy,
            batching=self.batching,
            static_batch_size=self.static_batch_size or min(DEFAULT_STATIC_BATCH_SIZE, self.max_num_seqs),
            static_run_to=self.static_run_to or "batch",
            tenant_weights=_parse_weights(self.tenant_weights),
        )
