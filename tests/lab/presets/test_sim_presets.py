"""Options and output of presets, and vllm-fig3."""

from __future__ import annotations

import io
import json
import sys
from types import SimpleNamespace

import pytest

from chairlift.errors import ConfigError
from chairlift.lab.presets import (
    PRESETS,
    Preset,
    PresetOptions,
    PresetResult,
    Table,
    find_preset,
    print_preset,
    print_presets,
)


def test_every_preset_is_listed_with_its_source() -> None:
    assert all(preset.title and preset.source for preset in PRESETS.values())
    out = io.StringIO()
    print_presets(PRESETS.values(), out)
    assert all(name in out.getvalue() for name in PRESETS)


def test_vllm_fig3_equals_the_published_numbers() -> None:
    """Kwon et al., SOSP'23, Figure 3: 2038 and 507 slots are never used."""
    result = find_preset("vllm-fig3").run(PresetOptions())
    assert {name: ours["never_used"] for name, ours in result.ours.items()} == {"A": 2038, "B": 507}
    assert all(result.ours[name][key] == value for name, row in result.published.items() for key, value in row.items())


def run_demo(options: PresetOptions) -> PresetResult:
    table = Table("T", ["what", "published", "ours"], [["speed [x]", "1", str(options.num_prompts)]])
    return PresetResult(
        [("efficiency", "0.6")],
        [table],
        ["Ours differs because of [this]."],
        {"speed": 1},
        {"speed": options.num_prompts},
    )


DEMO = Preset("demo", "A title", "A source", options=("num_prompts",))


def test_output_has_constants_tables_notes_and_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "chairlift.lab.presets.demo", SimpleNamespace(run=run_demo))
    out = io.StringIO()
    result = DEMO.run(PresetOptions(num_prompts=3))
    print_preset(DEMO, result, out)
    print_preset(DEMO, result, out, as_json=True)
    text = out.getvalue()
    places = [text.index(part) for part in ("A title", "efficiency", "published", "speed [x]", "because of [this]")]
    assert places == sorted(places)
    assert json.loads(text.splitlines()[-1]) == {"preset": "demo", "published": {"speed": 1}, "ours": {"speed": 3}}


def test_unsupported_option_is_rejected() -> None:
    with pytest.raises(ConfigError, match="workload_seed=5 does not apply; its options are: num_prompts"):
        DEMO.run(PresetOptions(workload_seed=5))
    with pytest.raises(ConfigError, match="num_prompts must be at least 1"):
        PresetOptions(num_prompts=0)


def test_unknown_preset_is_rejected() -> None:
    with pytest.raises(ConfigError, match="is unknown; use one of "):
        find_preset("fig4")


def test_rows_must_have_all_columns() -> None:
    with pytest.raises(AssertionError):
        Table("T", ["a", "b"], [["1"]])
