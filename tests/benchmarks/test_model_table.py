"""docs/models.md has a row for each architecture of the registry, in the format of its generator."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.model_table import COLUMNS, PAGE, ROOT, count_passed, parse_table, render, row_names

from chairlift.models.registry import ARCHITECTURES

FOLDERS_ONLY = ("OPT", "OlmoHybrid", "Lfm3")
"""The architectures whose GGUF files are not read."""

REPORT = """\
<testsuites><testsuite>
<testcase classname="tests.models.test_models_parity" name="test_logits_are_those_of_transformers[llama3-rope]"/>
<testcase classname="tests.models.test_models_parity" name="test_logits_are_those_of_transformers[llama]"/>
<testcase classname="tests.models.test_models_parity" name="test_logits_are_those_of_transformers[qwen3]">
  <skipped/></testcase>
<testcase classname="tests.models.test_models_parity" name="test_new_kv_memory_is_empty"/>
<testcase classname="tests.loading.text.test_loading_forged_turns"
  name="test_rendered_text_equals_transformers[gemma]"/>
</testsuite></testsuites>
"""


def test_the_page_lists_every_architecture() -> None:
    page = PAGE.read_text(encoding="utf-8")
    counts = parse_table(page)
    assert render(counts) == page
    for architecture in ARCHITECTURES.values():
        if not any(name.endswith("ForCausalLM") for name in architecture.hf_readers):
            continue  # an encoder, see docs/guide/embeddings.md
        rows = {name.removesuffix("ForCausalLM") for name in architecture.hf_readers} & set(row_names())
        assert rows, architecture.name
        for row in rows:
            assert counts[row, "logits"] > 0, row
            assert ((row, "GGUF") in counts) == (row not in FOLDERS_ONLY), row


def test_the_tests_of_the_page_exist() -> None:
    for column in COLUMNS:
        source = (ROOT / column.file).read_text(encoding="utf-8")
        assert [test for test in column.tests if f"def {test}(" not in source] == []


def test_cells_count_passed_tests(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    assert count_passed(report) == {
        ("Llama", "logits"): 2,
        ("Gemma", "chat template"): 1,
        ("Gemma2", "chat template"): 1,
        ("Gemma3", "chat template"): 1,
    }


def test_a_failure_is_an_error(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT.replace("<skipped/>", "<failure/>"))
    with pytest.raises(SystemExit, match=r"1 tests of the table failed: test_logits_are_.*\[qwen3\]"):
        count_passed(report)
