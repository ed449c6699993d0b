"""The frame that presets run in, and the presets that are quick enough to be tested here."""

from __future__ import annotations

import io
import json

import pytest

from chairlift.errors import ConfigError
from chairlift.lab.presets import (
    MODULES,
    Preset,
    PresetOptions,
    PresetResult,
    Table,
    all_presets,
    load_preset,
    run_preset,
)
from chairlift.lab.presets.printing import print_preset, print_presets


def test_every_preset_is_there_and_says_where_it_is_from() -> None:
    presets = all_presets()
    assert [preset.name for preset in presets] == list(MODULES)
    assert all(preset.title and preset.source for preset in presets)
    out = io.StringIO()
    print_presets(presets, out)
    assert all(name in out.getvalue() for name in MODULES)


def test_figure_3() -> None:
    """Kwon et al., SOSP'23, Figure 3: 2038 and 507 slots are never used."""
    result = run_preset(load_preset("vllm-fig3"), PresetOptions())
    assert {name: ours["never_used"] for name, ours in result.ours.items()} == {"A": 2038, "B": 507}
    assert all(result.ours[name][key] == value for name, row in result.published.items() for key, value in row.items())


def heeding(options: PresetOptions) -> PresetResult:
    table = Table("T", ["what", "published", "ours"], [["speed [x]", "1", str(options.num_prompts)]])
    return PresetResult(
        [("efficiency", "0.6")],
        [table],
        ["Ours differs because of [this]."],
        {"speed": 1},
        {"speed": options.num_prompts},
    )


HEEDING = Preset("demo", "A title", "A source", heeding, takes=frozenset({"num_prompts"}))


def test_it_is_printed_in_this_order() -> None:
    out = io.StringIO()
    print_preset(HEEDING, run_preset(HEEDING, PresetOptions(num_prompts=3)), out)
    text = out.getvalue()
    places = [text.index(part) for part in ("A title", "efficiency", "published", "speed [x]", "because of [this]")]
    assert places == sorted(places)
    assert json.loads(text.splitlines()[-1]) == {"preset": "demo", "published": {"speed": 1}, "ours": {"speed": 3}}


def test_an_option_that_is_not_heeded_is_refused() -> None:
    with pytest.raises(ConfigError, match="workload_seed=5 is not for it; it takes num_prompts"):
        run_preset(HEEDING, PresetOptions(workload_seed=5))
    with pytest.raises(ConfigError, match="num_prompts must be at least 1"):
        PresetOptions(num_prompts=0)


def test_a_name_that_nobody_knows() -> None:
    with pytest.raises(ConfigError, match="there is none; known are "):
        load_preset("fig4")


def test_a_row_has_all_its_columns() -> None:
    with pytest.raises(AssertionError):
        Table("T", ["a", "b"], [["1"]])
