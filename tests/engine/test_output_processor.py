"""The answer of a request does not depend on how its tokens are divided into outputs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from chairlift.engine.detokenizer import MAX_HELD, IncrementalDetokenizer, StopStrings
from chairlift.engine.input_processor import EngineRequest
from chairlift.engine.output_processor import AnswerBuilder, OutputProcessor
from chairlift.loading.model_source import GGUFSource
from chairlift.loading.text.tokenizer import Tokenizer
from chairlift.outputs import EngineCoreOutput, Logprob, RequestOutput, TokenLogprobs
from chairlift.sampling_params import SamplingParams
from chairlift.structured_outputs import Reasoning
from support.case_loop import loop_over
from support.gguf_files import write_tokenizer_gguf


class Letters:
    """One token for each letter."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(chr(ord("a") + token_id) for token_id in token_ids)

    def token_bytes(self, token_id: int) -> bytes:
        return self.decode([token_id]).encode()


def answer(tokens: list[int], sizes: list[int], params: SamplingParams, reason: str) -> RequestOutput:
    """The answer to a request whose outputs have these numbers of tokens; the last one has the rest."""
    processor, builder = OutputProcessor(Letters()), AnswerBuilder()
    processor.add("user", None, [EngineRequest("core", [0], params, 30, frozenset(), 0, 0.0)])
    position = 0
    while position < len(tokens):
        end = position + (sizes.pop(0) if sizes else len(tokens))
        new = tokens[position:end]
        position = end
        logprobs = [TokenLogprobs(Logprob(token, -0.5 * token, 1), []) for token in new]
        is_last = position >= len(tokens)
        output = EngineCoreOutput("core", new, reason if is_last else None, logprobs=logprobs)
        updates, stopped = processor.process([output], 1.0)
        for _, update in updates:
            assert isinstance(update, RequestOutput)
            builder.add(update)
        assert not stopped or not is_last
        if stopped:
            break
    return builder.build()


FORMS = [
    None,
    Reasoning("a", "b"),
    Reasoning("ab", "ca", is_inside=True),
    Reasoning("a", "cc", answer="b", ends=("bb",)),
]


@given(
    tokens=st.lists(st.integers(0, 2), min_size=1, max_size=20),
    sizes=st.lists(st.integers(1, 6), max_size=8),
    stop=st.lists(st.text("abc", min_size=1, max_size=3), max_size=2),
    options=st.fixed_dictionaries(
        {
            "include_stop_str_in_output": st.booleans(),
            "min_tokens": st.integers(0, 6),
            "reasoning": st.sampled_from(FORMS),
        }
    ),
    reason=st.sampled_from(["stop", "length"]),
)
@example([0, 1, 2, 0], [4], ["b"], {}, "length")
@settings(max_examples=200, deadline=None)
def test_answers_do_not_depend_on_the_size_of_outputs(
    tokens: list[int], sizes: list[int], stop: list[str], options: dict[str, Any], reason: str
) -> None:
    params = SamplingParams(max_tokens=30, stop=stop, logprobs=0, **options)
    assert answer(tokens, sizes, params, reason) == answer(tokens, [1] * len(tokens), params, reason)


@loop_over(
    ("text", "form", "options", "expected"),
    [
        ("axbxcxd", Reasoning("a", "c"), {}, "axbxc"),
        ("xbxcxd", Reasoning("a", "c", is_inside=True), {}, "xbxc"),
        ("bxcxd", Reasoning("a", "c"), {}, "b"),
        ("axbx", Reasoning("a", "c"), {}, "axbx"),
        ("axcyxz", Reasoning("a", "c", answer="yx"), {}, "axcyxz"),
        ("axcyxzx", Reasoning("a", "c", answer="yx"), {"include_stop_str_in_output": True}, "axcyxzx"),
        ("axdxb", Reasoning("a", "c", ends=("d",)), {}, "axd"),
        ("axcbxbbx", Reasoning("a", "c"), {"min_tokens": 3}, "axcbxbb"),
        ("xbxbx", None, {"min_tokens": 3}, "xb"),
    ],
)
def test_stop_strings_and_min_tokens_act_after_the_reasoning(
    text: str, form: Reasoning | None, options: dict[str, Any], expected: str
) -> None:
    params = SamplingParams(max_tokens=30, stop=["x"], reasoning=form, **options)
    tokens = [ord(letter) - ord("a") for letter in text]
    for sizes in ([1] * len(tokens), [len(tokens)], [2] * len(tokens)):
        (found,) = answer(tokens, sizes, params, "length").outputs
        assert found.text == expected
        is_stopped = len(expected) < len(text) or "include_stop_str_in_output" in options
        assert (found.finish_reason, found.stop_reason) == (("stop", "x") if is_stopped else ("length", None))


PIECES = [*"▁abtheHlo", "▁t", "▁th", "▁the", "▁H", "▁He", "▁▁", "😀", "漢"]
SENTENCEPIECE: dict[str, Any] = {
    "model": "llama",
    "tokens": ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], *PIECES],
    "token_type": [2, 3, 3] + [6] * 256 + [1] * len(PIECES),
    "scores": [0.0] * 259 + [-float(i) for i in range(len(PIECES))],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "unknown_token_id": 0,
}
FIRST_BYTE, FIRST_PIECE = 3, 259


@pytest.fixture(scope="module")
def tokenizer(smollm2_gguf: Path) -> Tokenizer:
    return GGUFSource(smollm2_gguf, "smollm2").tokenizer()


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A small vocabulary with byte fallback: most characters are several byte tokens, 😀 and 漢 are tokens."""
    path = write_tokenizer_gguf(tmp_path_factory.mktemp("sentencepiece") / "t.gguf", SENTENCEPIECE)
    return GGUFSource(path, "t").tokenizer()


@pytest.fixture(scope="module", params=["tokenizer", "sentencepiece"])
def either(request: pytest.FixtureRequest) -> Tokenizer:
    found: Tokenizer = request.getfixturevalue(request.param)
    return found


def stream(tokenizer: Tokenizer, prompt: list[int], pieces: list[list[int]]) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt)
    return [*(detokenizer.add(piece) for piece in pieces), detokenizer.flush()]


def one_by_one(tokenizer: Tokenizer, prompt: list[int], ids: list[int]) -> str:
    return "".join(stream(tokenizer, prompt, [[token] for token in ids]))


def continuation(tokenizer: Tokenizer, prompt: list[int], ids: list[int]) -> str:
    """The text after the prompt when all tokens are decoded at once."""
    known, text = tokenizer.decode(prompt), tokenizer.decode(prompt + ids)
    assert text.startswith(known)
    return text[len(known) :]


EMOJI, CJK = "😀😃😄😁😆😅", "𠮷野家で漢字"
SNIPPETS = [EMOJI, CJK, "é", " the", "Hello", "  ", "▁", "</s>", "<|im_end|>", "\n", "\ufffd", "\x00"]
MIXED = st.text(max_size=60) | st.lists(st.sampled_from(SNIPPETS), max_size=12).map("".join)


@given(text=MIXED, before=MIXED, cuts=st.lists(st.integers(1, 5), min_size=1))
@settings(max_examples=150, deadline=None)
def test_pieces_add_up_to_the_text(either: Tokenizer, text: str, before: str, cuts: list[int]) -> None:
    ids = either.encode(text, add_special_tokens=False)
    prompt = either.encode(before)
    expected = continuation(either, prompt, ids)
    pieces: list[list[int]] = []
    while ids:
        size = cuts[len(pieces) % len(cuts)]
        pieces.append(ids[:size])
        ids = ids[size:]
    assert "".join(stream(either, prompt, pieces)) == expected


@given(ids=st.lists(st.integers(0, 49151), max_size=40))
@settings(max_examples=150, deadline=None)
def test_the_texts_of_random_tokens_add_up_to_the_text(tokenizer: Tokenizer, ids: list[int]) -> None:
    assert one_by_one(tokenizer, tokenizer.encode("x"), ids) == tokenizer.decode(ids)


PIECE_IDS = st.integers(FIRST_PIECE, FIRST_PIECE + len(PIECES) - 1) | st.integers(0, 2) | st.just(FIRST_PIECE)


@given(prompt=st.lists(PIECE_IDS, max_size=4), ids=st.lists(PIECE_IDS, max_size=20))
@settings(max_examples=300, deadline=None)
def test_a_leading_space_is_dropped_as_in_the_whole_text(
    sentencepiece: Tokenizer, prompt: list[int], ids: list[int]
) -> None:
    assert one_by_one(sentencepiece, prompt, ids) == continuation(sentencepiece, prompt, ids)


@given(text=st.text("ab é😀😃🦙𠮷漢\n\ufffd", min_size=1, max_size=20), data=st.data())
@settings(max_examples=300, deadline=None)
def test_a_character_that_the_prompt_leaves_incomplete_is_emitted(
    either: Tokenizer, text: str, data: st.DataObject
) -> None:
    ids = either.encode(text, add_special_tokens=False)
    cut = data.draw(st.integers(1, len(ids)))
    before, whole = (b"".join(map(either.token_bytes, part)) for part in (ids[:cut], ids))
    expected = whole.decode()[len(before.decode(errors="ignore")) :]
    begun = "\ufffd" * (cut == len(ids) and before.decode(errors="ignore") != before.decode(errors="replace"))
    assert one_by_one(either, ids[:cut], ids[cut:]) == expected + begun


@given(parts=st.lists(st.sampled_from(["😀", "😃", "é", "the", "漢字", None]), min_size=1, max_size=8))
@settings(deadline=None)
def test_stray_bytes_do_not_change_characters(sentencepiece: Tokenizer, parts: list[str | None]) -> None:
    stray = FIRST_BYTE + 0xF0
    ids, expected = [], ""
    for part in parts:
        ids += [stray] if part is None else sentencepiece.encode(part, add_special_tokens=False)
        expected += "\ufffd" if part is None else f" {part}"
    assert one_by_one(sentencepiece, sentencepiece.encode("é😃"), ids) == expected


def test_characters_are_emitted_when_tokens_split_them(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode("e" + "😃" * 40, add_special_tokens=False)
    pieces = stream(sentencepiece, [], [ids[start : start + 4] for start in range(0, len(ids), 4)])
    assert pieces == ["e", *["😃"] * 40, ""]


class CountingDecoder:
    """Records how many tokens each call decodes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.sizes: list[int] = []

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        self.sizes.append(len(token_ids))
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        return self._tokenizer.token_bytes(token_id)


@pytest.mark.parametrize("prompt", [[], [1], [FIRST_PIECE]], ids=["empty", "no text", "text"])
@pytest.mark.parametrize(
    ("endless", "window"),
    [([2], 4), ([FIRST_PIECE, 2, 2], 4), ([1 << 20], 4), ([FIRST_PIECE + 5], 4), ([FIRST_BYTE + 0xF0], 2 * MAX_HELD)],
    ids=["special", "spaces and special", "unknown", "text", "half characters"],
)
def test_the_number_of_decoded_tokens_does_not_grow(
    sentencepiece: Tokenizer, prompt: list[int], endless: list[int], window: int
) -> None:
    decoder = CountingDecoder(sentencepiece)
    detokenizer = IncrementalDetokenizer(decoder, prompt)
    decoder.sizes.clear()
    num_tokens = 400
    for i in range(num_tokens):
        detokenizer.add([endless[i % len(endless)]])
    assert len(decoder.sizes) <= 2 * num_tokens
    assert max(decoder.sizes) <= window


def test_an_incomplete_character_is_held_back(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a🦙b", add_special_tokens=False)
    assert len(ids) > 3
    pieces = stream(tokenizer, [], [[token] for token in ids])
    assert "\ufffd" not in "".join(pieces)
    assert [piece for piece in pieces if piece] == ["a", "🦙", "b"]


def test_special_tokens_are_skipped_or_kept(tokenizer: Tokenizer) -> None:
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
def test_stop_strings_cut_at_the_same_position_as_a_search_in_the_whole_text(
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
