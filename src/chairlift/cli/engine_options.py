"""The options of the engine, one for each field of EngineConfig, and of the model."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any

import typer

from chairlift.cli.option_groups import (
    Command,
    OptionValues,
    options_from_fields,
    parse_json_object,
    pop_options,
    with_options,
)
from chairlift.config import (
    BATCHINGS,
    DTYPES,
    KERNEL_SETS,
    KV_ARENAS,
    KV_CACHE_DTYPES,
    KV_POLICIES,
    QUANTIZATIONS,
    SCHEDULING_POLICIES,
    STATIC_RUN_TO,
    EngineConfig,
)
from chairlift.errors import ConfigError
from chairlift.loading.fetch import DEFAULT_MODEL, PACKAGED_MODELS
from chairlift.system.memory_limits import check_address_space

HELP = {
    "accept_terms": "Accept the terms of use of a model that is downloaded by name, such as gemma-3-270m.",
    "device": "Device: cpu or cuda.",
    "dtype": f"Data type of weights and activations: {', '.join(DTYPES)}. auto is float32 on the CPU.",
    "kernels": f"Kernel set: {', '.join(KERNEL_SETS)}. auto is native on the CPU if it is compiled, else torch.",
    "quantization": f"Quantize all linear layers to {', '.join(QUANTIZATIONS)} (native kernels). "
    "Default: the formats of the file.",
    "kv_cache_dtype": f"Data type of K and V: {', '.join(KV_CACHE_DTYPES)}. auto is bfloat16 with native kernels, else "
    "--dtype.",
    "max_model_len": "Maximum number of prompt and output tokens of a request. Default: the smaller of the model's "
    "context and the pool.",
    "max_num_seqs": "Maximum number of running requests (seats).",
    "max_num_batched_tokens": "Maximum number of tokens in one step (the token budget). Default: 512, of which "
    "native kernels compute as many as their speed allows.",
    "scheduling_policy": f"Order of the queue: {', '.join(SCHEDULING_POLICIES)}.",
    "tenant_weights": "Shares of tenants under --scheduling-policy fair, as a=1,b=2. Other tenants have 1.",
    "batching": f"Batching policy: {', '.join(BATCHINGS)}.",
    "static_batch_size": "Maximum size of a static batch.",
    "static_run_to": f"Scope of the longest output that a static batch is decoded to: {', '.join(STATIC_RUN_TO)}.",
    "block_size": "Number of slots (tokens) in a block of KV memory.",
    "kv_cache_memory_bytes": "Memory for K and V, such as 2GiB. Default: a share of the free memory.",
    "num_kv_blocks": "Number of blocks of KV memory, instead of --kv-cache-memory-bytes.",
    "kv": f"KV memory policy: {', '.join(KV_POLICIES)}.",
    "kv_arena": f"Allocator of reservations: {', '.join(KV_ARENAS)}.",
    "disable_hybrid_kv_cache_manager": "Keep K and V of layers with a sliding window as long as those of other layers.",
    "enable_prefix_caching": "Share the KV blocks of equal prefixes. Default: on with --kv paged.",
    "enable_kv_cache_events": "Emit the changes of the prefix cache as events, for routers.",
    "prefix_cache_dir": "Folder that keeps cached prefixes, also after a restart.",
    "prefix_cache_disk_bytes": "Maximum size of the prefixes of a model in --prefix-cache-dir, such as 20GiB. Default: "
    "10GiB.",
    "load_format": "auto reads the weights of MODEL; dummy creates random weights from its config.json alone.",
    "skip_tokenizer_init": "Load no tokenizer: prompts are token ids, and answers have no text.",
    "classifier_from_token": "Score pairs of texts by the logits of two tokens; give it twice, for Qwen3-Reranker with "
    "no and yes.",
    "speculative_config": 'Speculative decoding, as a JSON object such as {"method": "ngram"}. Default: off.',
    "lora_modules": "LoRA adapter to load at the start, as name=path, where path is a PEFT folder. Can be repeated.",
    "max_loras": "Maximum number of loaded LoRA adapters. Default: the number of --lora-modules.",
    "max_lora_rank": "Maximum rank of a LoRA adapter.",
    "seed": "Seed of the requests without a seed.",
    "num_threads": "Number of CPU threads. Default: all physical cores.",
    "event_log": "File to write all events to, as JSON lines.",
    "record_trace": "File to write the lengths, times and keyed prefix hashes of all requests to, for a replay.",
}

TEXT_OPTIONS = {
    "kv_cache_memory_bytes": str | None,
    "prefix_cache_disk_bytes": str,
    "speculative_config": str | None,
    "lora_modules": list[str] | None,
    "classifier_from_token": list[str] | None,
}
"""The options whose text is parsed."""

ENGINE_OPTIONS = {option.name: option for option in options_from_fields(EngineConfig, HELP, "Engine", TEXT_OPTIONS)}


def add_options(names: Iterable[str]) -> Callable[[Command], Command]:
    """Add some of the engine's options to a command.

    The command receives them, with its parameter `model`, as one `config`. Other fields have their defaults.
    """
    options = [ENGINE_OPTIONS[name] for name in names]

    def make(given: OptionValues) -> OptionValues:
        chosen = pop_options(given, options)
        for name in ("kv_cache_memory_bytes", "prefix_cache_disk_bytes"):
            if chosen.get(name) is not None:
                from chairlift.worker.memory import parse_memory

                chosen[name] = parse_memory(chosen[name], name)
        if (text := chosen.get("speculative_config")) is not None:
            chosen["speculative_config"] = parse_json_object("speculative_config", text, {"method": "ngram"})
        if (modules := chosen.get("lora_modules")) is not None:
            chosen["lora_modules"] = parse_lora_modules(modules)
        if not chosen.get("classifier_from_token"):
            chosen.pop("classifier_from_token", None)
        return {"config": EngineConfig(model=given.pop("model"), **chosen)}

    return lambda command: with_options(command, options, make, "config")


def add_engine_options(command: Command) -> Command:
    """Add all options of the engine to a command. The command fails early if the address space is too small."""
    with_config = add_options(ENGINE_OPTIONS)(command)

    @functools.wraps(with_config)
    def checked(**given: Any) -> None:
        check_address_space()
        with_config(**given)

    return checked


def parse_lora_modules(items: Sequence[str]) -> dict[str, str] | None:
    """Parse items "name=path". Raises ConfigError if one has another form, or a name occurs twice."""
    modules: dict[str, str] = {}
    for item in items:
        name, _equals, path = item.partition("=")
        if not name or not path or name in modules:
            raise ConfigError(f"lora_modules must be name=path with distinct names, got {item!r:.200}")
        modules[name] = path
    return modules or None


MODEL_HELP = f"Folder, .gguf file, {', '.join(PACKAGED_MODELS)}, or name on the hub. Default: {DEFAULT_MODEL}."
ModelOption = Annotated[str | None, typer.Option(help=MODEL_HELP)]


def log_to_stderr() -> None:
    """Write the log to standard error. Lines that cannot be written are dropped without a traceback."""
    logging.raiseExceptions = False
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
