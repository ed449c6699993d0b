"""The page about the choice of a model has the numbers of the plan and of the cost model."""

from __future__ import annotations

from pathlib import Path

from docs.choose_model import CONTEXT, MACHINES, MODELS, NUM_SEQS, page, rows

from chairlift.engine.startup.required_memory import SERVER_PROCESSES_BYTES

ROOT = Path(__file__).parents[3]


def test_the_page_is_the_planned_one() -> None:
    written = (ROOT / "docs" / "guide" / "choose-a-model.md").read_text(encoding="utf-8")
    assert written == page(), "run `python -m docs.choose_model > docs/guide/choose-a-model.md`"


def test_the_default_model_has_the_size_of_its_file_and_its_keys_and_values(smollm2_gguf: Path) -> None:
    planned = {row.name: row for row in rows()}
    assert planned.keys() == MODELS.keys()
    default = planned["SmolLM2 135M (the default)"]
    assert 0.95 < default.file_bytes / smollm2_gguf.stat().st_size <= 1
    kv_bytes = NUM_SEQS * CONTEXT * 23_040
    least = kv_bytes + default.file_bytes + SERVER_PROCESSES_BYTES
    assert least < default.memory_bytes < 1.2 * least
    for row in planned.values():
        assert [sorted(each) for each in zip(*row.speeds, strict=True)] == [list(each) for each in zip(*row.speeds)]  # noqa: B905
        assert len(row.speeds) == len(MACHINES)
