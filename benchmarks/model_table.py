"""Writes docs/models.md, the table of model architectures and the tests that each of them passes.

    python -m benchmarks.model_table [--junit REPORT.xml] [--only NAME] [--output docs/models.md]

The script runs the tests of the table with pytest, or reads the report of an earlier run (`pytest --junit-xml`). Each
cell is the number of tests of one architecture that passed. With `--only` the cells of other tests keep the numbers
that the page has. The exit status is 1, and no page is written, if a test failed or an architecture of the registry has
none.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final
from xml.etree import ElementTree

from chairlift.models.reading.nearest_names import MISSING_FEATURES
from chairlift.models.registry import ARCHITECTURES

ROOT: Final = Path(__file__).parent.parent
PAGE: Final = ROOT / "docs" / "models.md"
SUFFIX: Final = "ForCausalLM"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table.

    Attributes:
        claim: what the tests of the column show.
        file: the path of their file.
        tests: the names of the test functions.
    """

    title: str
    claim: str
    file: str
    tests: tuple[str, ...]


COLUMNS: Final = (
    Column(
        "logits",
        "A folder with safetensors files gives the logits of transformers for whole prompts, chunks and decodes, with "
        "the torch and native kernels, and for whole prompts with the reference kernels.",
        "tests/models/test_models_parity.py",
        ("test_logits_are_those_of_transformers",),
    ),
    Column(
        "GGUF",
        "A GGUF file, converted as by llama.cpp, gives the logits of transformers.",
        "tests/models/test_gguf_parity.py",
        ("test_gguf_files_give_the_logits_of_transformers",),
    ),
    Column(
        "greedy tokens",
        "The engine gives the greedy tokens of transformers: paged, in chunks, batched, preempted, with and without "
        "the prefix cache.",
        "tests/engine/test_engine_parity.py",
        ("test_greedy_tokens_are_those_of_transformers",),
    ),
    Column(
        "int8, 4 bits",
        "With native kernels and quantized weights, tokens and their log probabilities are the same to the last bit: "
        "in chunks, batches, small blocks, after preemptions and with another number of threads.",
        "tests/engine/test_engine_parity.py",
        ("test_logits_do_not_depend_on_batch_chunks_blocks_or_threads",),
    ),
    Column(
        "LoRA",
        "Adapters of PEFT for all linear layers, or for those that it can merge, give the logits of the merged "
        "weights, in batches with other adapters.",
        "tests/models/test_lora_logits.py",
        ("test_logits_are_those_of_merged_weights",),
    ),
    Column(
        "windows freed",
        "Blocks that left a sliding window are released: the same tokens as without it, in less memory.",
        "tests/engine/test_window_release.py",
        ("test_released_windows_give_the_same_tokens_in_less_memory",),
    ),
    Column(
        "chat template",
        "A chat template in the manner of the model's is rendered and encoded as by transformers.",
        "tests/loading/text/test_loading_forged_turns.py",
        ("test_rendered_text_equals_transformers", "test_ordinary_prompts_equal_transformers"),
    ),
)

TEMPLATES: Final = {
    "chatml": "Qwen2",
    "ernie4_5": "Ernie4_5",
    "exaone4": "Exaone4",
    "gemma": "Gemma Gemma2 Gemma3",
    "gemma4": "Gemma4 Gemma4Unified",
    "gpt_oss": "GptOss",
    "granite3": "Granite GraniteMoe",
    "llama31": "Llama",
    "mistral": "Mistral Mixtral",
    "olmo3": "Olmo3",
    "phi3": "Phi3",
    "qwen3": "Qwen3 Qwen3Moe",
    "smollm3": "SmolLM3",
}
"""A template of `tests/support/chat_templates.py` -> the rows whose models have such a template."""

INTRODUCTION: Final = """\
# Tested models

`python -m benchmarks.model_table` runs the tests below, most of them with every architecture, and writes this page. A
row is an entry of `architectures` in `config.json`, without "ForCausalLM". A cell is the number of its tests that
passed, or a dash if there is no such test.
The planned memory of the weights of each is exact to the byte (`test_planned_engines.py`).
The models of the tests are random and tiny, and use every feature of their architecture. Of models with images only the
text model is loaded.
"""


NOT_SUPPORTED: Final = """\
## Not supported

A model of another architecture is rejected before its weights are read, with the nearest supported architectures. For
these the message names the reason:

| models | reason |
|---|---|
"""


def row_names() -> list[str]:
    """The name of each row: every model class without images that the registry can load."""
    names = {name for architecture in ARCHITECTURES.values() for name in architecture.hf_readers}
    spellings = {name.lower(): name.removesuffix(SUFFIX) for name in sorted(names) if name.endswith(SUFFIX)}
    return sorted(spellings.values())


def tested_rows() -> dict[str, dict[str, list[str]]]:
    """For each column: a parameter of its tests (a key of TINY_MODELS, or a template) -> the rows that it is about."""
    tests = ROOT / "tests"
    sys.path.append(str(tests))
    models = importlib.import_module("support.tiny_models").TINY_MODELS
    rows = {variant: [family] for variant, (family, _) in models.items()}
    templates = {template: families.split() for template, families in TEMPLATES.items()}
    return {column.title: templates if column.title == "chat template" else rows for column in COLUMNS}


def run_tests(report: Path, only: str) -> None:
    """Run the tests of all columns with every architecture, and write a report in the format of JUnit.

    Args:
        only: the part of their names that the tests must have; an empty text for all tests.
    """
    tests = [f"{column.file}::{test}" for column in COLUMNS for test in column.tests]
    command = [sys.executable, "-m", "pytest", "-q", f"--junit-xml={report}", "-k", only, *tests]
    subprocess.run(command, cwd=ROOT, check=False, env={**os.environ, "EVERY_ARCHITECTURE": "1"})


def count_passed(report: Path) -> Counter[tuple[str, str]]:
    """Count the passed tests of each (row, title of a column).

    Raises:
        SystemExit: A test failed.
    """
    titles = {(Path(column.file).stem, test): column.title for column in COLUMNS for test in column.tests}
    rows, counts, failed = tested_rows(), Counter[tuple[str, str]](), []
    for case in ElementTree.parse(report).iter("testcase"):
        test, _, parameters = case.get("name", "").partition("[")
        title = titles.get((case.get("classname", "").rpartition(".")[2], test))
        if title is None or case.find("skipped") is not None:
            continue
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(case.get("name", ""))
        named = (rows[title][name] for name in re.split(r"[-\]]", parameters) if name in rows[title])
        counts.update((row, title) for row in next(named, []))
    if failed:
        raise SystemExit(f"{len(failed)} tests of the table failed: {', '.join(failed)}")
    return counts


def render(counts: Mapping[tuple[str, str], int]) -> str:
    """The page with the given numbers of passed tests."""
    titles = [column.title for column in COLUMNS]
    lines = [f"| architecture | {' | '.join(titles)} |", "|---" * (len(titles) + 1) + "|"]
    lines += [
        f"| {row} | {' | '.join(str(counts.get((row, title)) or '-') for title in titles)} |" for row in row_names()
    ]
    claims = [f"- **{each.title}**: {each.claim} Tests: {_names(each)} in `{each.file}`." for each in COLUMNS]
    missing = [f"| {each.models} | {each.reason} |" for each in MISSING_FEATURES]
    return "\n".join([INTRODUCTION, *lines, "", *claims, "", NOT_SUPPORTED + "\n".join(missing), ""])


def _names(column: Column) -> str:
    return ", ".join(f"`{test}`" for test in column.tests)


def parse_table(page: str) -> dict[tuple[str, str], int]:
    """The numbers of a page that `render` wrote, by row and title."""
    lines = page.partition(NOT_SUPPORTED)[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line[:1] == "|"]
    titles = cells[0][1:]
    return {
        (row, title): int(cell)
        for row, *numbers in cells[2:]
        for title, cell in zip(titles, numbers, strict=True)
        if cell != "-"
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--junit", type=Path, help="the report of an earlier run, instead of running the tests")
    parser.add_argument("--only", default="", metavar="NAME", help="the key of a model in TINY_MODELS: test it alone")
    parser.add_argument("--output", type=Path, default=PAGE)
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        report = options.junit or Path(folder) / "report.xml"
        if options.junit is None:
            run_tests(report, options.only)
        counts = count_passed(report)
    if options.only:
        counts = Counter({**parse_table(options.output.read_text(encoding="utf-8")), **counts})
    if missing := [row for row in row_names() if not counts[row, "logits"]]:
        raise SystemExit(f"these architectures have no test of their logits: {', '.join(missing)}")
    options.output.write_text(render(counts), encoding="utf-8")
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
