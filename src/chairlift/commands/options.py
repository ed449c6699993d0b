"""Options that several commands take: the engine's, one for each field of EngineConfig, and the model."""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Annotated, Any, get_type_hints

import typer

from chairlift.config import (
    ATTENTION_BACKENDS,
    BATCHINGS,
    DTYPES,
    KV_ARENAS,
    KV_CACHE_DTYPES,
    KV_POLICIES,
    QUANTIZATIONS,
    SCHEDULING_POLICIES,
    STATIC_RUN_TO,
    EngineConfig,
)

HELP = {
    "device": "cpu or cuda.",
    "dtype": f"Of weights and activations: {', '.join(DTYPES)}; auto is float32 on the CPU.",
    "attention_backend": f"The kernels: {', '.join(ATTENTION_BACKENDS)}; auto is native on the CPU if compiled.",
    "quantization": f"Bring all matrices to {', '.join(QUANTIZATIONS)} (native kernels); as in the file if not given.",
    "kv_cache_dtype": f"Of K and V: {', '.join(KV_CACHE_DTYPES)}; auto is bfloat16 with native kernels, else --dtype.",
    "max_model_len": "Prompt and output tokens of one request; the smaller of context and pool if not given.",
    "max_num_seqs": "Requests that run at once (seats).",
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


def _engine_options() -> dict[str, inspect.Parameter]:
    """The fields of EngineConfig as options of a command: name, type and default are the field's."""
    kinds = {**get_type_hints(EngineConfig), "kv_cache_memory": str | None}
    options = {}
    for field in fields(EngineConfig):
        if field.name == "model":
            continue
        names = [f"--{field.name.replace('_', '-')}"] if field.default is False else []
        option = typer.Option(*names, help=HELP[field.name], rich_help_panel="Engine")
        options[field.name] = inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=Annotated[kinds[field.name], option],
            default=field.default,
        )
    return options


ENGINE_OPTIONS = _engine_options()


def takes_options(names: Iterable[str]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command some of the engine's options; it receives them as one `config`, whose other fields have their
    defaults. The command's `model` parameter is the model."""
    engine_options = {name: ENGINE_OPTIONS[name] for name in names}

    def takes(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def wrapped(**given: Any) -> None:
            options = {name: given.pop(name) for name in engine_options}
            if options.get("kv_cache_memory") is not None:
                from chairlift.worker.memory import parse_memory

                options["kv_cache_memory"] = parse_memory(options["kv_cache_memory"])
            command(config=EngineConfig(model=given.pop("model"), **options), **given)

        keyword = inspect.Parameter.KEYWORD_ONLY
        signature = inspect.signature(command, eval_str=True)
        own = [p.replace(kind=keyword) for name, p in signature.parameters.items() if name != "config"]
        parameters = [*own, *engine_options.values()]
        wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapped.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return wrapped

    return takes


def takes_engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command all of the engine's options."""
    return takes_options(ENGINE_OPTIONS)(command)


ModelArgument = Annotated[
    str | None,
    typer.Argument(help="A folder, a .gguf file or a name on the hub; the default is SmolLM2-135M-Instruct."),
]
ModelOption = Annotated[
    str | None,
    typer.Option(help="A folder, a .gguf file or a name on the hub; the default is SmolLM2-135M-Instruct."),
]


def log_to_stderr() -> None:
    """Show what the engine says, on standard error."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
