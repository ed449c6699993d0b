"""Draws the figures and prints the numbers of docs/policies: the same requests under every batching and KV policy.

    python -m benchmarks.policy_figures [--model MODEL] [--output docs/images/policies]

24 requests arrive at the start, with forced lengths and a larger `max_tokens`, and run on the default model in a pool
of 56 blocks. The clock of the engine is constant, so figures and means count steps and depend only on the decisions.
The numbers are computed from the events. The exit status is 1 if the answers differ between policies.

The script writes one PNG for each figure, and prints the tables of docs/policies/README.md and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
from benchmarks.drawing import STYLE, save_picture
from matplotlib.figure import Figure

from benchmarks import batch_picture, memory_map, memory_picture, queue_picture, waste_picture
from chairlift.clock import VirtualClock
from chairlift.config import SCHEDULING_POLICIES, EngineConfig
from chairlift.engine.startup.factory import build_engine
from chairlift.engine.startup.loaded_model import LoadedModel, load_model
from chairlift.errors import ChairliftError
from chairlift.events import EventList
from chairlift.lab.bench.driver import drive_all_at_once
from chairlift.lab.report.recorded_run import RecordedRun, recorded_run
from chairlift.lab.workload.arrivals import ArrivalProcess
from chairlift.lab.workload.lengths import parse_lengths
from chairlift.lab.workload.request import WorkloadRequest
from chairlift.lab.workload.synthetic import make_workload
from chairlift.slo import SLO

SEED, NUM_REQUESTS = 1, 24
PROMPT_LEN, OUTPUT_LEN, MAX_TOKENS = "uniform:16..64", "exp:48,4..128", "uniform:32..160"
LIMITS: Final[dict[str, Any]] = {
    "num_kv_blocks": 56,
    "block_size": 16,
    "max_model_len": 256,
    "max_num_batched_tokens": 256,
}
FEW_SEATS, MANY_SEATS = 4, 16

STATIC: Final = {"max_num_seqs": FEW_SEATS, "batching": "static", "static_batch_size": FEW_SEATS}
POLICIES: Final[dict[str, dict[str, Any]]] = {
    "continuous/paged": {"max_num_seqs": MANY_SEATS},
    "continuous/oracle": {"max_num_seqs": MANY_SEATS, "kv": "oracle"},
    "continuous/pow2": {"max_num_seqs": MANY_SEATS, "kv": "pow2"},
    "continuous/exact": {"max_num_seqs": MANY_SEATS, "kv": "exact"},
    "continuous/exact, first fit": {"max_num_seqs": MANY_SEATS, "kv": "exact", "kv_arena": "first-fit"},
    "continuous/max": {"max_num_seqs": MANY_SEATS, "kv": "max"},
    "continuous/paged, 4 seats": {"max_num_seqs": FEW_SEATS},
    "static(4)/paged": STATIC,
    "static(4)/oracle": {**STATIC, "kv": "oracle"},
    "static(4)/pow2": {**STATIC, "kv": "pow2"},
    "static(4)/exact": {**STATIC, "kv": "exact"},
    "static(4)/max": {**STATIC, "kv": "max"},
    "static(4)/paged, to global": {**STATIC, "static_run_to": "global"},
}
"""The options of each run by its label, in addition to LIMITS."""

ORDERS: Final[dict[str, dict[str, Any]]] = {
    name: {"max_num_seqs": FEW_SEATS, "scheduling_policy": name, "length_predictor": "oracle"}
    for name in SCHEDULING_POLICIES
}
"""The options of the runs of `order_requests` by the order of the queue, in addition to LIMITS."""


@dataclass(frozen=True, slots=True)
class PolicyFigure:
    """A figure of the runs with these labels, which is written to NAME.png."""

    name: str
    draw: Callable[[Sequence[RecordedRun]], Figure]
    labels: tuple[str, ...]


KV_RUNS: Final[dict[str, tuple[str, ...]]] = {
    "paged": ("continuous/paged",),
    "oracle": ("continuous/oracle",),
    "pow2": ("continuous/pow2",),
    "exact": ("continuous/exact", "continuous/exact, first fit"),
    "max": ("continuous/max",),
}
"""The runs on the page of each KV policy."""

FIGURES: Final = (
    PolicyFigure("waste", waste_picture.draw, tuple(label for labels in KV_RUNS.values() for label in labels)),
    PolicyFigure("continuous-batch", batch_picture.draw, ("continuous/paged, 4 seats", "continuous/paged")),
    PolicyFigure(
        "static-batch",
        batch_picture.draw,
        ("continuous/paged, 4 seats", "static(4)/paged", "static(4)/paged, to global"),
    ),
    PolicyFigure("static-kinds", memory_picture.draw, ("continuous/paged, 4 seats", "static(4)/paged")),
    *(PolicyFigure(f"{kv}-map", memory_map.draw, labels) for kv, labels in KV_RUNS.items()),
    *(PolicyFigure(f"{kv}-kinds", memory_picture.draw, labels) for kv, labels in KV_RUNS.items()),
    *(PolicyFigure(f"order-{name}", queue_picture.draw, ("fcfs", name)) for name in ORDERS if name != "fcfs"),
)


# -- the runs ------------------------------------------------------------------------------------------------------


def make_requests(vocab_size: int) -> list[WorkloadRequest]:
    """Create the requests, which are the same in every run."""
    prompt, output, declared = map(parse_lengths, (PROMPT_LEN, OUTPUT_LEN, MAX_TOKENS))
    return make_workload(SEED, NUM_REQUESTS, prompt, output, ArrivalProcess(), vocab_size, max_tokens=declared)


def order_requests(policy: str, vocab_size: int) -> list[WorkloadRequest]:
    """Create the same requests with what orders of the queue read: two tenants, of which B sends the last third,
    priorities under that policy, three prefixes of two blocks, and objectives of different lengths."""
    requests = make_requests(vocab_size)
    return [
        replace(
            request,
            tenant="A" if index < 16 else "B",
            priority=index % 3 if policy == "priority" else 0,
            slo=SLO(ttft_ms=1000 * (1 + 7 * index % NUM_REQUESTS)),
            prompt_token_ids=[index % 3] * 32 + list(request.prompt_token_ids),
        )
        for index, request in enumerate(requests)
    ]


def run_policy(label: str, loaded: LoadedModel) -> tuple[RecordedRun, dict[str, list[int]]]:
    """Run the policy of a label; returns the run and the output tokens of each request."""
    log = EventList()
    config = replace(loaded.engine_config, **LIMITS, **(POLICIES | ORDERS)[label])
    engine = build_engine(config, loaded=loaded, clock=VirtualClock(), events=log)
    vocab_size = engine.facts.model_config.vocab_size
    requests = order_requests(label, vocab_size) if label in ORDERS else make_requests(vocab_size)
    tokens = drive_all_at_once(engine, requests)
    return recorded_run(log.events, label), tokens


# -- the numbers ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PolicyNumbers:
    """The numbers of one run.

    Attributes:
        mean_rows, peak_rows: mean and maximum number of requests in a step, including finished ones in static batches.
        tokens_a_step: mean number of output tokens in a step.
        padding, recomputed: number of padding tokens, and of tokens computed again after a preemption.
        token_states and the other kinds: mean shares of the pool over the steps in which requests waited, by the true
            lengths.
    """

    label: str
    steps: int
    mean_rows: float
    peak_rows: int
    tokens_a_step: float
    padding: int
    recomputed: int
    preemptions: int
    token_states: float
    reserved: float
    internal: float
    external: float
    free: float


def policy_numbers(run: RecordedRun) -> PolicyNumbers:
    metrics = run.metrics
    return PolicyNumbers(
        label=run.label,
        steps=metrics.num_steps,
        mean_rows=metrics.mean_batch_size,
        peak_rows=metrics.peak_batch_size,
        tokens_a_step=metrics.output_tokens / metrics.num_steps,
        padding=metrics.padding_tokens,
        recomputed=metrics.recomputed_tokens,
        preemptions=metrics.preemptions,
        **run.waste().shares,
    )


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"


Columns = dict[str, Callable[[PolicyNumbers], str]]

TABLES: Final[tuple[Columns, ...]] = (
    {
        "steps": lambda n: str(n.steps),
        "mean rows": lambda n: f"{n.mean_rows:.1f}",
        "padding tokens": lambda n: f"{n.padding:,}",
        "recomputed tokens": lambda n: f"{n.recomputed:,}",
    },
    {
        "token states": lambda n: _percent(n.token_states),
        "reserved": lambda n: _percent(n.reserved),
        "internal": lambda n: _percent(n.internal),
        "external": lambda n: _percent(n.external),
    },
)
"""The columns of each table of docs/policies/README.md, after the name of the run."""


def markdown_tables(rows: Sequence[PolicyNumbers]) -> list[str]:
    """Returns the tables of docs/policies/README.md."""
    return [_markdown_table(columns, rows) for columns in TABLES]


def _markdown_table(columns: Columns, rows: Sequence[PolicyNumbers]) -> str:
    lines = [["run", *columns], ["---", *["---:"] * len(columns)]]
    lines += [[row.label, *(text(row) for text in columns.values())] for row in rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


# -- the command ---------------------------------------------------------------------------------------------------


def draw_figure(figure: PolicyFigure, runs: dict[str, RecordedRun], folder: Path) -> Path:
    """Write one figure."""
    path = folder / f"{figure.name}.png"
    with mpl.rc_context(STYLE):
        picture = figure.draw([runs[label] for label in figure.labels])
    save_picture(picture, path)
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help=".gguf file or folder; default: the default model")
    parser.add_argument("--num-threads", type=int, help="number of CPU threads; default: all cores")
    default = Path(__file__).parents[1] / "docs" / "images" / "policies"
    parser.add_argument("--output", type=Path, default=default, help="folder of the figures")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    loaded = load_model(EngineConfig(model=args.model, skip_tokenizer_init=True, num_threads=args.num_threads))
    runs: dict[str, RecordedRun] = {}
    answers: dict[str, dict[str, list[int]]] = {}
    for label in POLICIES | ORDERS:
        runs[label], answers[label] = run_policy(label, loaded)
        print(f"{label}: {runs[label].metrics.num_steps} steps", file=sys.stderr)
    for figure in FIGURES:
        print(draw_figure(figure, runs, args.output), file=sys.stderr)
    rows = [policy_numbers(runs[label]) for label in POLICIES]
    same = all(answers[label] == answers[next(iter(group))] for group in (POLICIES, ORDERS) for label in group)
    print("\n\n".join(markdown_tables(rows)))
    print(json.dumps({"benchmark": "policies", "same_tokens": same, "runs": [asdict(row) for row in rows]}))
    return 0 if same else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ChairliftError as error:
        sys.exit(f"error: {error}")
