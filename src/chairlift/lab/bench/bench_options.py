"""The options of the benchmarks of engines. They are declared apart from the benchmarks, which import torch."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import ClassVar

from chairlift.config import KV_ARENAS, SCHEDULING_POLICIES
from chairlift.errors import ConfigError
from chairlift.lab.bench.policies import ComparedPolicy, parse_policies
from chairlift.lab.bench.workload_options import WorkloadOptions
from chairlift.lab.workload.arrivals import ArrivalProcess
from chairlift.lab.workload.lengths import parse_lengths
from chairlift.lab.workload.request import WorkloadRequest
from chairlift.lab.workload.synthetic import make_workload
from chairlift.options import check_options, option, split_names


def _split_integers(text: str, name: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in split_names(text, name))
    except ValueError:
        raise ConfigError(f"{name} must be integers separated by commas, got {text!r}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputOptions(WorkloadOptions):
    """A workload of greedy requests with random prompts and forced output lengths, and the number of runs.

    All runs have the same lengths and arrivals; their tokens differ.
    """

    repeats: int = option(3, "Number of measured runs.", minimum=1)
    num_warmups: int = option(4, "Number of requests in the unmeasured run before them.", minimum=0)


@dataclass(frozen=True, slots=True)
class LatencyOptions:
    """The sizes of the batch and the number of iterations.

    The requests are greedy. Their prompts are random, and differ between iterations.

    Raises:
        ConfigError: a value is out of range. The message names the option, the value and the limit.
    """

    OPTION_GROUP: ClassVar = "Batch"

    input_len: int = option(32, "Number of prompt tokens of each request.", minimum=1)
    output_len: int = option(128, "Number of output tokens of each request, forced.", minimum=1)
    batch_size: tuple[int, ...] = option(
        (8,),
        "Number of requests, which all arrive at the start. Several numbers, as 1,2,4, are measured alternately. "
        "Default: 8.",
        parse=_split_integers,
        minimum=1,
    )
    num_iters: int = option(10, "Number of measured iterations.", minimum=1)
    num_iters_warmup: int = option(2, "Number of unmeasured iterations before the measured ones.", minimum=0)
    seed: int = option(0, "Seed of the tokens in prompts.", name="workload_seed", minimum=0)

    def __post_init__(self) -> None:
        check_options(self)
        if not self.batch_size:
            raise ConfigError("batch_size must have at least one value")

    def workload(self, batch_size: int, vocab_size: int, token_round: int) -> list[WorkloadRequest]:
        """Create the requests of one batch."""
        prompt, output = parse_lengths(f"fixed:{self.input_len}"), parse_lengths(f"fixed:{self.output_len}")
        return make_workload(
            self.seed, batch_size, prompt, output, ArrivalProcess(), vocab_size, token_round=token_round
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions(WorkloadOptions):
    """A workload of greedy requests with forced lengths, and the policies that serve it.

    `max_tokens` determines the reservations of kv=exact. If neither this option nor the trace has it, it is the largest
    value that fits max_model_len beside the prompt, which is the default of the API too. Tokens differ by round.

    Raises:
        ConfigError: there is only one policy, an option has no effect on them, or as for `WorkloadOptions`.
    """

    policies: tuple[ComparedPolicy, ...] = option(
        "static,exact,max,paged",
        "Policies to compare; the first one is the baseline. paged, exact, max, pow2, oracle: continuous batching with "
        "this KV policy. static, and static-global (decoded to the longest output of all requests), use the KV policy "
        f"max. {', '.join(SCHEDULING_POLICIES)} (and srpt:PREDICTOR) are orders of the queue over the KV policy paged. "
        "BATCHING/KV/ORDER combines others, such as static/paged or static/paged/srpt:oracle. Default: "
        "static,exact,max,paged.",
        parse=parse_policies,
    )
    max_tokens: int | None = option(
        None, "max_tokens of every request. Default: the largest value that fits --max-model-len.", minimum=1
    )
    static_batch_size: int | None = option(None, "Maximum size of a static batch.", minimum=1)
    kv_arena: str | None = option(None, "Allocator of reservations. Default: buddy.", choices=KV_ARENAS)
    repeats: int = option(3, "Number of rounds, in which each policy serves the same requests once.", minimum=1)
    num_warmups: int = option(4, "Number of requests in an unmeasured run of each policy before them.", minimum=0)
    save_events: Path | None = option(None, "Folder for one event log of each policy, from the first round.")

    def __post_init__(self) -> None:
        WorkloadOptions.__post_init__(self)
        names = ", ".join(policy.name for policy in self.policies)
        if len(self.policies) < 2:
            raise ConfigError(f"policies must have at least two names, separated by commas, got {names!r}")
        if self.static_batch_size is not None and not any(policy.is_static for policy in self.policies):
            raise ConfigError(f"static_batch_size={self.static_batch_size}: none of {names} is static; leave it out")
        if self.kv_arena is not None and not any(policy.reserves for policy in self.policies):
            raise ConfigError(f"kv_arena={self.kv_arena}: none of {names} reserves; leave it out")


@dataclass(frozen=True, slots=True)
class PerplexityOptions:
    """The text to score and the reference to compare with.

    Raises:
        ConfigError: a value is out of range. The message names the option, the value and the limit.
    """

    OPTION_GROUP: ClassVar = "Text"

    text: Path = option(MISSING, "Text file in UTF-8, such as benchmarks/data/alice.txt of the repository.")
    window: int = option(
        512,
        "Number of tokens in a window. Windows do not overlap: the first token of each is given, the others are "
        "predicted. The last one may be shorter.",
        minimum=2,
    )
    num_windows: int | None = option(None, "Number of windows, from the beginning. Default: the whole text.", minimum=1)
    against: str | None = option(
        None,
        "Reference: float32 (the same model with weights, activations and KV memory in float32 on the torch kernels), "
        "or the name of another model with the same vocabulary, run in that way. Default: none.",
    )

    def __post_init__(self) -> None:
        check_options(self)
