"""Options that several commands take: the engine's, one for each field of EngineConfig, and the model."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer

from chairlift.cli.option_groups import Command, OptionValues, options_from_fields, pop_options, with_options
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
from chairlift.system.memory_limits import check_address_space

HELP = {
    "device": "cpu or cuda.",
    "dtype": f"Of weights and activations: {', '.join(DTYPES)}; auto is float32 on the CPU.",
    "kernels": f"Kernel set: {', '.join(KERNEL_SETS)}; auto is native on the CPU if it is compiled, else torch.",
    "quantization": f"Bring all matrices to {', '.join(QUANTIZATIONS)} (native kernels); as in the file if not given.",
    "kv_cache_dtype": f"Of K and V: {', '.join(KV_CACHE_DTYPES)}; auto is bfloat16 with native kernels, else --dtype.",
    "max_model_len": "Prompt and output tokens of one request; the smaller of context and pool if not given.",
    "max_num_seqs": "Maximum number of running requests (seats).",
    "max_num_batched_tokens": "Tokens computed in one step (the token budget); 512, or what keeps a native step short.",
    "scheduling_policy": f"One of {', '.join(SCHEDULING_POLICIES)}.",
    "tenant_weights": "Shares of tenants under --scheduling-policy fair, as a=1,b=2; 1 for those not named.",
    "batching": f"When the batch is chosen: {', '.join(BATCHINGS)}.",
    "static_batch_size": "Members of a static batch at most.",
    "static_run_to": f"What a static batch is decoded to the longest output of: {', '.join(STATIC_RUN_TO)}.",
    "block_size": "Slots (token positions) in a block of KV memory.",
    "kv_cache_memory": "Memory for K and V, such as 2GiB; a share of what is free if not given.",
    "num_kv_blocks": "The KV pool in blocks, instead of --kv-cache-memory.",
    "kv": f"When a request gets its KV memory: {', '.join(KV_POLICIES)}.",
    "kv_arena": f"Where reservations come from: {', '.join(KV_ARENAS)}.",
    "enable_prefix_caching": "Share the KV blocks of equal prefixes; on for --kv paged if not given.",
    "random_weights": "Build MODEL from its config.json alone.",
    "skip_tokenizer_init": "Load no tokenizer: prompts are token ids, answers have no text.",
    "seed": "Of the random streams of requests without a seed of their own.",
    "num_threads": "CPU threads; all if not given.",
    "event_log": "Write every event to this file, as JSON lines.",
    "record_trace": "Write lengths, times and keyed prefix hashes of all requests to this file, to serve them again.",
}


ENGINE_OPTIONS = {
    option.name: option for option in options_from_fields(EngineConfig, HELP, "Engine", {"kv_cache_memory": str | None})
}


def add_options(names: Iterable[str]) -> Callable[[Command], Command]:
    """Give a command some of the engine's options; it receives them as one `config`, whose other fields have their
    defaults. The command's `model` parameter is the model."""
    options = [ENGINE_OPTIONS[name] for name in names]

    def make(given: OptionValues) -> OptionValues:
        chosen = pop_options(given, options)
        if chosen.get("kv_cache_memory") is not None:
            from chairlift.worker.memory import parse_memory

            chosen["kv_cache_memory"] = parse_memory(chosen["kv_cache_memory"], "kv_cache_memory")
        return {"config": EngineConfig(model=given.pop("model"), **chosen)}

    return lambda command: with_options(command, options, make, "config")


def add_engine_options(command: Command) -> Command:
    """Give a command all of the engine's options; it ends at once if no engine could start."""
    with_config = add_options(ENGINE_OPTIONS)(command)

    @functools.wraps(with_config)
    def checked(**given: Any) -> None:
        check_address_space()
        with_config(**given)

    return checked


ModelArgument = Annotated[
    str | None,
    typer.Argument(help="A folder, a .gguf file or a name on the hub; the default is SmolLM2-135M-Instruct."),
]
ModelOption = Annotated[
    str | None,
    typer.Option(help="A folder, a .gguf file or a name on the hub; the default is SmolLM2-135M-Instruct."),
]


def log_to_stderr() -> None:
    """Write the log of the package to standard error. Lines that cannot be written are dropped without a traceback."""
    logging.raiseExceptions = False
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
