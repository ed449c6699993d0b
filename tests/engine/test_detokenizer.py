from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.engine.detokenizer import IncrementalDetokenizer, StopStrings
from chairlift.loading.resolve import ModelFiles, load_tokenizer
from chairlift.loading.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(smollm2_gguf: Path) -> Tokenizer:
    return load_tokenizer(ModelFiles("gguf", smollm2_gguf, "smollm2"))


def stream(tokenizer: Tokenizer, prompt: list[int], pieces: list[list[int]]) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt)
    return [*(detokenizer.add(piece) for piece in pieces), detokenizer.flush()]


@given(text=st.text(max_size=60), cuts=st.lists(st.integers(1, 5), min_size=1))
@settings(max_examples=150, deadline=None)
def test_pieces_add_up_to_the_text(tokenizer: Tokenizer, text: str, cuts: list[int]) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = []
    while ids:
        size = cuts[len(pieces) % len(cuts)]
        pieces.append(ids[:size])
        ids = ids[size:]
    prompt = tokenizer.encode("Tell me something:")
    expected = tokenizer.decode([token for piece in pieces for token in piece])
    assert "".join(stream(tokenizer, prompt, pieces)) == expected


@given(ids=st.lists(st.integers(0, 49151), max_size=40))
@settings(max_examples=150, deadline=None)
def test_any_tokens_at_all_add_up(tokenizer: Tokenizer, ids: list[int]) -> None:
    pieces = stream(tokenizer, tokenizer.encode("x"), [[token] for token in ids])
    assert "".join(pieces) == tokenizer.decode(ids)


def test_half_a_character_is_held_back(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a🦙b", add_special_tokens=False)
    assert len(ids) > 3
    pieces = stream(tokenizer, [], [[token] for token in ids])
    assert "\ufffd" not in "".join(pieces)
    assert [piece for piece in pieces if piece] == ["a", "🦙", "b"]


def test_half_a_character_at_the_end_is_not_lost(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ok🦙", add_special_tokens=False)[:-1]
    assert "".join(stream(tokenizer, [], [[token] for token in ids])) == tokenizer.decode(ids)


def test_special_tokens_are_left_out_or_kept(tokenizer: Tokenizer) -> None:
    end = tokenizer.token_to_id("<|im_end|>")
    assert end is not None
    ids = [*tokenizer.encode("done", add_special_tokens=False), end]
    assert IncrementalDetokenizer(tokenizer, []).add(ids) == "done"
    assert IncrementalDetokenizer(tokenizer, [], skip_special_tokens=False).add(ids) == "done<|im_end|>"


@given(
    pieces=st.lists(st.text("abc", max_size=4), max_size=12),
    stop=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    include=st.booleans(),
)
@settings(max_examples=400, deadline=None)
def test_stop_strings_cut_where_a_search_in_the_whole_text_would(
    pieces: list[str], stop: list[str], include: bool
) -> None:
    watcher = StopStrings(stop, include)
    shown, found = "", None
    for piece in pieces:
        text, found = watcher.add(piece)
        shown += text
        if found is not None:
            break
    else:
        shown += watcher.flush()
    text = "".join(pieces)
    if found is None:
        assert shown == text
        assert not any(s in text for s in stop)
        return
    up_to = shown if include else shown + found
    assert text.startswith(up_to)
    assert up_to.endswith(found)
    earlier = "".join(pieces[: _piece_of(pieces, len(up_to))])
    assert not any(s in earlier for s in stop)


def _piece_of(pieces: list[str], length: int) -> int:
    """The index of the piece in which a text of `length` characters ends."""
    total = 0
    for index, piece in enumerate(pieces):
        total += len(piece)
        if total >= length:
            return index
    return len(pieces)


@given(pieces=st.lists(st.text("ab", min_size=1, max_size=1), max_size=20), stop=st.text("ab", min_size=1, max_size=3))
def test_one_character_at_a_time_the_first_stop_string_wins(pieces: list[str], stop: str) -> None:
    watcher = StopStrings([stop])
    shown = ""
    for piece in pieces:
        text, found = watcher.add(piece)
        shown += text
        if found:
            break
    else:
        shown += watcher.flush()
    assert shown == "".join(pieces).split(stop)[0]


def test_text_that_may_begin_a_stop_string_is_held_back() -> None:
    watcher = StopStrings(["END"])
    assert watcher.add("the E") == ("the ", None)
    assert watcher.add("N") == ("", None)
    assert watcher.add("T") == ("ENT", None)
    assert watcher.add("! END.") == ("! ", "END")
