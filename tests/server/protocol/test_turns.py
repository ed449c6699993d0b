"""Turns of conversations are split and combined without loss."""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

from chairlift.server.protocol.turns import with_single_calls


class CountedCall(dict[str, Any]):
    """A call that counts the reads of its fields."""

    reads: ClassVar[Counter[str]] = Counter()

    def get(self, name: str, default: Any = None) -> Any:
        self.reads[name] += 1
        return super().get(name, default)


def result(call_id: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def calling(*calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": list(calls)}


def test_each_call_is_read_once_whatever_results_follow() -> None:
    calls = [CountedCall(id=str(index)) for index in range(100)]
    CountedCall.reads.clear()
    results = [result(call_id, call_id) for index in range(100) for call_id in (str(index), "unknown")]
    turns = with_single_calls([{"role": "user", "content": "Hi"}, calling(*calls), *results])
    assert CountedCall.reads["id"] == 100
    assert turns[1:201] == [turn for call in calls for turn in (calling(call), result(call["id"], call["id"]))]
    assert turns[201:] == [result("unknown", "unknown")] * 100


def test_results_of_one_call_keep_their_order() -> None:
    a, b, answers = {"id": "a"}, {"id": "b"}, [result("a", "1"), result("a", "2")]
    assert with_single_calls([calling(a, b), *answers]) == [calling(a), *answers, calling(b)]


def test_a_result_after_a_turn_of_the_user_stays_there() -> None:
    a, b, user = {"id": "a"}, {"id": "b"}, {"role": "user", "content": "So?"}
    assert with_single_calls([calling(a, b), result("a", "1"), user, result("b", "2")]) == [
        *(calling(a), result("a", "1"), calling(b)),
        *(user, result("b", "2")),
    ]
