"""Groups of layers have as many layers each, every layer is in one of them, and padding is small."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chairlift.loading.model_source import FolderSource
from chairlift.models.declaration.attention_spec import AttentionSpec
from chairlift.models.declaration.model_config import ModelConfig
from chairlift.models.kv_layout import KVLayout

GEMMA3 = [512, 512, 512, 512, 512, None]


@pytest.fixture(scope="module")
def config(tiny_model_dir: Callable[..., Path]) -> ModelConfig:
    return FolderSource(tiny_model_dir("gemma3"), "tiny").config()


def with_attention(config: ModelConfig, specs: Sequence[AttentionSpec]) -> ModelConfig:
    return replace(config, layers=tuple(replace(config.layers[0], attention=spec) for spec in specs))


def with_windows(config: ModelConfig, windows: Sequence[int | None]) -> ModelConfig:
    spec = config.layers[0].attention
    return with_attention(config, [replace(spec, sliding_window=window) for window in windows])


def test_the_numerous_kind_of_layers_is_divided_into_groups_of_the_size_of_the_other(config: ModelConfig) -> None:
    layout = KVLayout.by_window(with_windows(config, GEMMA3 * 3), 8192)
    assert layout.windows == (None, 512, 512, 512, 512, 512)
    assert layout.layers[:3] == ((5, 11, 17), (0, 1, 2), (3, 4, 6))
    assert max(map(len, layout.layers)) == 3


def test_groups_of_layers_of_few_kinds(config: ModelConfig) -> None:
    layout = KVLayout.by_window(with_windows(config, [*GEMMA3 * 4, 512, 512]), 8192)
    assert [len(layers) for layers in layout.layers] == [4, 4, 4, 4, 4, 4, 2]
    layout = KVLayout.by_window(with_windows(config, [*[None] * 12, *[512] * 13]), 8192)
    assert [len(layers) for layers in layout.layers] == [12, 13]
    assert max(map(len, layout.layers)) == 13


@pytest.mark.parametrize(
    ("windows", "context", "expected"),
    [
        ([None, None], 8192, None),
        ([512, 512], 8192, 512),
        ([512, None], 513, None),
        ([512, None], 512, None),
        ([512, 512], 512, None),
    ],
)
def test_layers_with_one_lifetime_are_one_group(
    config: ModelConfig, windows: list[int | None], context: int, expected: int | None
) -> None:
    layout = KVLayout.by_window(with_windows(config, windows), context)
    if context == 513:
        assert layout.windows == (None, 512)
    else:
        assert layout == KVLayout(windows=(expected,), layers=((0, 1),))


@pytest.mark.parametrize(("windows", "expected"), [([512, None], None), ([512, 1024], 1024)])
def test_layers_with_heads_of_different_size_are_one_group_with_the_longest_window(
    config: ModelConfig, windows: list[int | None], expected: int | None
) -> None:
    spec = config.layers[0].attention
    first, second = (replace(spec, sliding_window=window) for window in windows)
    other = with_attention(config, [first, replace(second, head_dim=2 * spec.head_dim)])
    assert KVLayout.by_window(other, 8192) == KVLayout.one_group(other, expected)


@given(st.lists(st.sampled_from([None, 4, 512]), min_size=1, max_size=40))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
def test_every_layer_is_in_one_group_of_its_window(config: ModelConfig, windows: list[int | None]) -> None:
    layout = KVLayout.by_window(with_windows(config, windows), 8192)
    assert sorted(index for layers in layout.layers for index in layers) == list(range(len(windows)))
    for window, layers in zip(layout.windows, layout.layers, strict=True):
        assert {windows[index] for index in layers} == {window}
        assert layers
