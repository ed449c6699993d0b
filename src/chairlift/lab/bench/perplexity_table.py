"""The perplexity of a text for people: a table; and, as the last line, one JSON object for programs."""

from __future__ import annotations

import math
import sys
from typing import TextIO

from rich.console import Console
from rich.table import Table

from chairlift.lab.bench.perplexity import Comparison, PerplexityResult
from chairlift.lab.bench.tables import machine_caption
from chairlift.lab.bench.text import json_line


def print_perplexity(result: PerplexityResult, file: TextIO | None = None) -> None:
    """Write the table, then the JSON line, to `file` (standard output if None)."""
    out = file or sys.stdout
    Console(file=out).print(perplexity_table(result))
    out.write(json_line(result.to_dict()))


def perplexity_table(result: PerplexityResult) -> Table:
    """Perplexity, and how far it is from the reference if there is one."""
    options = result.options
    title = (
        f"{result.engine.model}: {options.text.name}, {result.num_tokens:,} tokens predicted in {result.num_windows} "
        f"windows of {options.window}"
    )
    caption = machine_caption(result.machine, result.peak_rss_bytes)
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left", min_width=72)
    table.add_column("")
    table.add_column("value", justify="right")
    table.add_row("perplexity", f"{result.perplexity:.4f}")
    if result.against is not None:
        for row in _comparison_rows(result.against):
            table.add_row(*row)
    return table


def _comparison_rows(against: Comparison) -> list[tuple[str, str]]:
    change = 100 * math.expm1(against.log_ratio)
    stderr = "" if against.log_ratio_stderr is None else f" ± {100 * against.log_ratio_stderr:.2f}"
    return [
        (f"perplexity of {against.reference}", f"{against.perplexity:.4f}"),
        ("change", f"{change:+.2f}{stderr} %"),
        ("same likeliest token", f"{100 * against.greedy_agreement:.2f} %"),
        ("mean KL divergence", f"{against.mean_kl:.6f} nats"),
    ]
