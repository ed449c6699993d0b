"""Measures the speed of a draft model against the probability that its tokens are right, beside the prediction.

    python -m benchmarks.speculation_break_even --model MODEL --draft-model MODEL [--quantization int8]
                                                [--draft-tokens 4] [--probabilities 0,0.2,0.4,0.6,0.8,1] [--rounds 5]
                                                [--json]

The draft model computes as it does in operation, but each of its tokens is replaced by the right one with the given
probability, and otherwise by a wrong one. So models with random weights can be measured, whose own proposals would
never be right. One request runs at a time:

    always     `draft-tokens` draft tokens in every step
    limited    as many as the engine expects to pay, which may be none

The prediction is the formula of `choose_counts` with the measured times of steps, for `draft-tokens` draft tokens:
(1 + p + p^2 + ...) T(1) / (T(1 + draft-tokens) + draft-tokens x time of the draft model). A ratio is the speed relative
to the run without speculative decoding in the same round, the median of the rounds.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.common import print_result, spread
from rich.table import Table

from chairlift import EngineConfig, SamplingParams
from chairlift.core.speculation.draft_counts import DraftCost, choose_counts
from chairlift.engine.startup.factory import Engine, build_engine
from chairlift.engine.startup.loaded_model import load_model
from chairlift.events import EventList, Step
from chairlift.worker.draft_model import DraftModel
from chairlift.worker.model_runner import ModelRunner


class PartlyRightDrafts:
    """Runs a draft model, and replaces its tokens by right ones with a probability, otherwise by wrong ones."""

    def __init__(self, runner: ModelRunner) -> None:
        assert isinstance(runner._proposer, DraftModel)
        self._model = runner._proposer
        self._rows = runner._rows
        self.probability = 0.0
        self.answer: list[int] = []
        self._random = random.Random(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def propose(self, num_drafts: Mapping[str, int]) -> dict[str, list[int]]:
        proposed = self._model.propose(num_drafts)
        for request_id, tokens in proposed.items():
            row = self._rows.row_of(request_id)
            start = int(self._rows.num_tokens[row] - self._rows.num_prompt_tokens[row])
            right = self.answer[start : start + len(tokens)]
            proposed[request_id] = [t if self._random.random() < self.probability else t ^ 1 for t in right]
            self._rows.write_drafts(row, proposed[request_id])
        return proposed


@dataclass(frozen=True, slots=True)
class Point:
    """The ratios at one probability; `share` is the share of the limited steps that had draft tokens."""

    probability: float
    predicted: float
    always: list[float]
    limited: list[float]
    share: float


def generate(engine: Engine, prompt: Sequence[int], num_tokens: int) -> tuple[float, list[int]]:
    """Run one greedy request; returns the output tokens per second after the first one, and the tokens."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    (request,) = engine.input_processor.make("r", list(prompt), params, arrival_time=0.0)
    engine.core.add(request.to_request())
    tokens: list[int] = []
    started = 0.0
    while len(tokens) < num_tokens:
        for output in engine.core.step():
            started = started or time.perf_counter()
            tokens += output.new_token_ids
    return (num_tokens - 1) / (time.perf_counter() - started), tokens


def measure(options: argparse.Namespace) -> tuple[list[Point], Engine]:
    config = EngineConfig(
        model=options.model,
        quantization=options.quantization,
        max_model_len=options.prompt_len + options.output_len + 64,
        max_num_seqs=1,
        enable_prefix_caching=False,
        block_size=64,
        skip_tokenizer_init=True,
    )
    loaded = load_model(config)
    events = EventList()
    draft = {"model": options.draft_model, "num_speculative_tokens": options.draft_tokens}
    plain = build_engine(config, loaded=loaded)
    always, limited = (
        build_engine(replace(config, speculative_config=draft), loaded=loaded, events=log) for log in (None, events)
    )
    selection = always.core.scheduler._drafts
    assert selection is not None
    selection._cost = DraftCost()
    rng = random.Random(1)
    prompt = [rng.randrange(loaded.config.vocab_size) for _ in range(options.prompt_len)]
    answer = generate(plain, prompt, options.output_len)[1]
    drafts = []
    for engine in (always, limited):
        runner = engine.core._executor
        assert isinstance(runner, ModelRunner)
        replacement = PartlyRightDrafts(runner)
        replacement.answer = [*answer, *[0] * options.draft_tokens]
        runner._proposer = replacement
        drafts.append(replacement)
    points = []
    for probability in options.probabilities:
        ratios: tuple[list[float], list[float]] = [], []
        del events.events[:]
        for _ in range(options.rounds):
            base, _ = generate(plain, prompt, options.output_len)
            for engine, draft_model, found in zip((always, limited), drafts, ratios, strict=True):
                draft_model.probability = probability
                speed, tokens = generate(engine, prompt, options.output_len)
                assert tokens == answer, "speculative decoding changed the output"
                found.append(speed / base)
        steps = [event for event in events.events if isinstance(event, Step)]
        share = sum(bool(step.num_draft) for step in steps) / len(steps)
        points.append(Point(probability, predict(limited, probability, options.draft_tokens), *ratios, share))
    return points, limited


def predict(engine: Engine, probability: float, num_drafts: int) -> float:
    """The predicted ratio with `num_drafts` draft tokens in every step."""
    limits = engine.facts.scheduler_config
    assert limits.row_time is not None
    assert limits.draft_row_time is not None
    expected = sum(probability**position for position in range(num_drafts + 1))
    seconds = limits.row_time.seconds(1 + num_drafts) + num_drafts * limits.draft_row_time.seconds(1)
    return expected * limits.row_time.seconds(1) / seconds


def break_even(engine: Engine, num_drafts: int) -> float | None:
    """The smallest probability, in steps of 0.01, at which the engine verifies draft tokens; None if it never does."""
    limits = engine.facts.scheduler_config
    cost = DraftCost(limits.row_time, limits.draft_row_time)
    probabilities = (percent / 100 for percent in range(1, 101))
    return next((p for p in probabilities if choose_counts([p], [num_drafts], 1, 1, 64, cost) != [0]), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft-model", required=True)
    parser.add_argument("--quantization")
    parser.add_argument("--draft-tokens", type=int, default=4)
    parser.add_argument("--probabilities", type=_numbers, default=[0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    options = parser.parse_args()
    points, engine = measure(options)
    threshold = break_even(engine, options.draft_tokens)
    begin = "never verifies draft tokens" if threshold is None else f"verifies draft tokens from p = {threshold:.2f} on"
    table = Table(title=f"{options.draft_tokens} draft tokens; the engine {begin}")
    for name in ("p", "predicted", "always", "limited", "steps with drafts"):
        table.add_column(name, justify="right")
    for point in points:
        measured = [spread(ratios) for ratios in (point.always, point.limited)]
        table.add_row(f"{point.probability:g}", f"{point.predicted:.2f}", *measured, f"{point.share:.0%}")
    limits = engine.facts.scheduler_config
    assert limits.row_time is not None
    assert limits.draft_row_time is not None
    record = {
        "row_time": dict(limits.row_time.points),
        "draft_row_time": dict(limits.draft_row_time.points),
        "break_even": threshold,
        "points": [asdict(point) for point in points],
    }
    print_result("speculation_break_even", vars(options), record, [table], as_json=options.json)


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
