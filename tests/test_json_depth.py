"""The nesting depth of a schema is computed before it is parsed."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.structured_outputs import json_depth

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='[]{}"\\a\n', max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(alphabet='{["\\', max_size=3), inner, max_size=3)
    ),
    max_leaves=20,
)


def depth(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth, value.values()), default=0)
    return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0


@given(value=JSON, indent=st.sampled_from([None, 1]), ascii_only=st.booleans())
@settings(max_examples=200, deadline=None)
def test_the_depth_of_a_text_equals_that_of_its_value(value: Any, indent: int | None, ascii_only: bool) -> None:
    assert json_depth(json.dumps(value, indent=indent, ensure_ascii=ascii_only).encode()) == depth(value)


@given(st.binary(max_size=60) | st.text(alphabet='[]{}"\\,:1', max_size=60).map(str.encode))
@settings(max_examples=300, deadline=None)
def test_the_depth_of_invalid_json_is_at_least_what_a_parser_reaches(body: bytes) -> None:
    assert json_depth(body) >= 0
    assert json_depth(b"[" * 70 + body) >= 70
    assert json_depth(b'"' + body.replace(b'"', b"").replace(b"\\", b"")) == 0


def test_hostile_texts_take_linear_time() -> None:
    for body in (b'"' + b'\\"' * 500_000 + b"\\", b'"' * 1_000_001, b"[]," * 300_000, b"\\" * 1_000_000):
        assert json_depth(body) <= 1
