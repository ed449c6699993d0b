"""`chairlift plan`: plans memory and speed of an engine before its model is loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from cyclopts import Parameter

from chairlift.cli.console import Json
from chairlift.config import EngineConfig
from chairlift.lab.bench.workload_options import WorkloadOptions
from chairlift.option_sources import with_options
from chairlift.options import Selection, check_options, option
from chairlift.system.memory_amounts import parse_memory

ENGINE_OPTIONS = (
    "dtype",
    "kernels",
    "quantization",
    "kv_cache_dtype",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "batching",
    "static_batch_size",
    "kv",
    "kv_arena",
    "disable_hybrid_kv_cache_manager",
    "speculative_config",
    "max_loras",
    "max_lora_rank",
    "block_size",
    "kv_cache_memory_bytes",
    "num_kv_blocks",
)
"""The options of the engine that affect a plan."""


WORKLOAD_OPTIONS = ("input_len", "output_len", "request_rate", "seed")


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What is planned."""

    OPTION_GROUP: ClassVar = "Plan"

    max_tokens: str | None = option(
        None, "max_tokens of the requests, a number or a distribution. Default: their true output lengths."
    )
    memory: int | None = option(
        None,
        "Memory for processes, weights, activations, K and V, such as 24GiB. Default: as in chairlift serve.",
        parse=parse_memory,
    )
    device: str = option("cpu", "cpu, cuda, A100-40GB, A100-80GB, H100-SXM, H200, or a file of simulate --calibrate.")
    replicas: int = option(1, "Number of replicas on one machine, which share its memory and the requests.", minimum=1)

    def __post_init__(self) -> None:
        check_options(self)


@with_options
def plan(
    model: Annotated[
        str | None,
        Parameter(
            help="Folder with config.json, .gguf file, name on the hub, or shape (opt-13b, llama-3-8b, ...). "
            "Default: SmolLM2-135M-Instruct."
        ),
    ] = None,
    /,
    *,
    as_json: Json = False,
    options: PlanOptions,
    load: Annotated[WorkloadOptions, Selection(only=WORKLOAD_OPTIONS)],
    config: Annotated[EngineConfig, Selection(only=ENGINE_OPTIONS)],
) -> None:
    """Plan an engine for a model and a workload on a device."""
    from chairlift.lab.planning.deployment import plan_deployment
    from chairlift.lab.planning.plan_report import print_plan

    planned = plan_deployment(
        replace(config, model=model),
        load,
        device=options.device,
        memory_bytes=options.memory,
        max_tokens=options.max_tokens,
        replicas=options.replicas,
    )
    print_plan(planned, as_json=as_json)
