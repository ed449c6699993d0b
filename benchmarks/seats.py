"""Checks continuous batching by its events: 48 requests at the start, a few seats, and one long prompt.

    python -m benchmarks.seats [--max-num-seqs 16] [--max-num-batched-tokens 256] [--long-prompt 2048] [--svg FILE]
                               [--json]

Output lengths are forced, from 8 to 256 tokens, shuffled. The claims are checked with the events alone:

a. the seat of a request that finishes in step k is taken by the next waiting request in step k + 1;
b. a request whose prompt is computed generates exactly one token in every step, also while a long prompt is computed;
c. at the end every block is free. (A last request of one token runs alone, and its step shows the pool.)

Prints a table. The exit status is 1 if a claim fails. --svg draws one lane for each seat.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.common import print_result
from benchmarks.seats_picture import Cell, Picture
from rich.table import Table

from chairlift.config import EngineConfig
from chairlift.engine.startup.factory import Engine, build_engine
from chairlift.errors import ChairliftError
from chairlift.events import EngineStarted, Event, EventList, RequestArrived, Step
from chairlift.lab.bench.driver import drive_all_at_once
from chairlift.lab.workload.request import WorkloadRequest

NUM_REQUESTS: Final = 48
SHORTEST_OUTPUT, LONGEST_OUTPUT = 8, 256
PROMPT_LENS: Final = range(16, 65)
LONG_ID, PROBE_ID = "long", "probe"


def make_requests(seed: int, long_prompt: int, vocab_size: int) -> list[WorkloadRequest]:
    """The requests in their order: lengths spread evenly and shuffled, the long prompt in the middle."""
    rng = random.Random(seed)
    span = LONGEST_OUTPUT - SHORTEST_OUTPUT
    output_lens = [SHORTEST_OUTPUT + round(i * span / (NUM_REQUESTS - 1)) for i in range(NUM_REQUESTS)]
    rng.shuffle(output_lens)

    def request(name: str, prompt_len: int, output_len: int) -> WorkloadRequest:
        return WorkloadRequest(name, 0.0, [rng.randrange(vocab_size) for _ in range(prompt_len)], output_len)

    requests = [request(f"r{i}", rng.choice(PROMPT_LENS), length) for i, length in enumerate(output_lens)]
    requests.insert(NUM_REQUESTS // 2, request(LONG_ID, long_prompt, 64))
    return requests


def run(engine: Engine, log: EventList, requests: Sequence[WorkloadRequest]) -> list[Event]:
    """Run the requests, then the probe, and return all events."""
    drive_all_at_once(engine, requests)
    drive_all_at_once(engine, [WorkloadRequest(PROBE_ID, 0.0, [0], 1)])
    return log.events


# -- the events ----------------------------------------------------------------------------------------------------


class SeatInterval(NamedTuple):
    """The use of a seat by one request, from the step that admitted it to the step that ended it, both included."""

    request_id: str
    seat: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class SeatReport:
    """The counts that the three claims are checked with.

    Attributes:
        seats_freed: seats of requests that finished while others waited.
        seats_taken_next_step: those of them that were taken in the following step.
        out_of_order: number of admissions of a request other than the next one in the queue.
        chunk_steps: steps that computed a part of the long prompt.
        decodes_beside: tokens of other requests in those steps.
        decodes_left_out: number of times that a request with a computed prompt did not get exactly one token in a step.
        free_blocks: free blocks at the end, of num_blocks.
    """

    num_steps: int
    num_finished: int
    seats_freed: int
    seats_taken_next_step: int
    out_of_order: int
    chunk_steps: int
    decodes_beside: int
    decodes_left_out: int
    preemptions: int
    free_blocks: int
    num_blocks: int

    @property
    def claims(self) -> dict[str, bool]:
        in_time = self.seats_freed == self.seats_taken_next_step > 0
        return {
            "a freed seat is taken by the next waiting request in the next step": in_time and not self.out_of_order,
            "every decoding request has one token in each step, also during a long prefill": (
                self.decodes_beside > 0 and not self.decodes_left_out
            ),
            "at the end every block is free": self.free_blocks == self.num_blocks,
        }


class SeatLog:
    """The events of a run under FCFS: all requests arrive at the start, and the probe at the end."""

    def __init__(self, events: Iterable[Event]) -> None:
        events = list(events)
        (self.engine,) = (event for event in events if isinstance(event, EngineStarted))
        self.arrived = {event.request_id: event for event in events if isinstance(event, RequestArrived)}
        self.long, self.probe = self._id_of(LONG_ID), self._id_of(PROBE_ID)
        every_step = [event for event in events if isinstance(event, Step)]
        self.steps = [step for step in every_step if self.probe not in step.request_ids]
        (self.last_step,) = (step for step in every_step if self.probe in step.request_ids)

    def _id_of(self, name: str) -> str:
        """The id of a request by its name, to which the engine appends a suffix that makes ids unique."""
        (request_id,) = (request_id for request_id in self.arrived if request_id.partition("~")[0] == name)
        return request_id

    def intervals(self) -> list[SeatInterval]:
        """The seat of each request. The seat that was freed first is taken first."""
        free = deque(range(self.engine.max_num_seqs))
        seated: dict[str, tuple[int, int]] = {}
        intervals = []
        for index, step in enumerate(self.steps):
            for request_id in step.preempted:
                intervals.append(SeatInterval(request_id, *seated.pop(request_id), index - 1))
                free.append(intervals[-1].seat)
            for request_id in step.admitted:
                seated[request_id] = free.popleft(), index
            for request_id in step.finished:
                intervals.append(SeatInterval(request_id, *seated.pop(request_id), index))
                free.append(intervals[-1].seat)
        assert not seated, "the run went to its end"
        return intervals

    def handovers(self) -> Iterator[tuple[int, int]]:
        """(step that freed a seat, next step that took it) for each seat that was taken again."""
        last_of: dict[int, int] = {}
        for interval in sorted(self.intervals(), key=lambda interval: interval.first):
            if interval.seat in last_of:
                yield last_of[interval.seat], interval.first
            last_of[interval.seat] = interval.last

    def report(self) -> SeatReport:
        handovers = list(self.handovers())
        chunks = [step for step in self.steps if self._is_chunk(step, self.long)]
        return SeatReport(
            num_steps=len(self.steps),
            num_finished=sum(len(step.finished) for step in self.steps),
            seats_freed=len(handovers),
            seats_taken_next_step=sum(taken == freed + 1 for freed, taken in handovers),
            out_of_order=self._out_of_order(),
            chunk_steps=len(chunks),
            decodes_beside=sum(sum(not self._is_chunk(step, rid) for rid in step.request_ids) for step in chunks),
            decodes_left_out=self._decodes_left_out(),
            preemptions=sum(len(step.preempted) for step in self.steps),
            free_blocks=self.last_step.free_blocks + self._blocks_of_probe(),
            num_blocks=self.engine.num_blocks,
        )

    def _out_of_order(self) -> int:
        place = {request_id: index for index, request_id in enumerate(self.arrived)}
        waiting = set(place) - {self.probe}
        count = 0
        for step in self.steps:
            waiting.update(step.preempted)
            for request_id in step.admitted:
                count += request_id != min(waiting, key=place.__getitem__)
                waiting.remove(request_id)
        return count

    def _decodes_left_out(self) -> int:
        """Count the steps that did not compute one token of a request which sampled in its previous step."""
        decoding: set[str] = set()
        left_out = 0
        for step in self.steps:
            got = dict(zip(step.request_ids, step.num_scheduled, strict=True))
            left_out += sum(got.get(request_id) != 1 for request_id in decoding.difference(step.preempted))
            decoding |= {rid for rid, new in zip(step.request_ids, step.num_new, strict=True) if new}
            decoding.difference_update(step.finished, step.preempted)
        return left_out

    def _is_chunk(self, step: Step, request_id: str) -> bool:
        """Whether the step computes prompt tokens of the request."""
        if request_id not in step.request_ids:
            return False
        computed = step.num_computed[step.request_ids.index(request_id)]
        return computed < self.arrived[request_id].num_prompt_tokens

    def _blocks_of_probe(self) -> int:
        return -(-self.arrived[self.probe].num_prompt_tokens // self.engine.block_size)

    def cells(self) -> Iterator[Cell]:
        """The cells of all intervals: prefill steps, decode steps, and the last step as the end."""
        for interval in self.intervals():
            kinds = [
                "prefill" if self._is_chunk(self.steps[index], interval.request_id) else "decode"
                for index in range(interval.first, interval.last)
            ]
            yield from _merge_cells(interval, [*kinds, "end"])


def _merge_cells(interval: SeatInterval, kinds: Sequence[str]) -> Iterator[Cell]:
    start = 0
    for index in range(1, len(kinds) + 1):
        if index == len(kinds) or kinds[index] != kinds[start]:
            yield Cell(interval.seat, interval.first + start, index - start, kinds[start])
            start = index


# -- the command ---------------------------------------------------------------------------------------------------


def picture(log: SeatLog) -> Picture:
    """The picture of the whole run, in which the prefill of the long prompt is enlarged."""
    cells = list(log.cells())
    (interval,) = (interval for interval in log.intervals() if interval.request_id == log.long)
    chunk = next(cell for cell in cells if cell.seat == interval.seat and cell.step == interval.first)
    tokens = f"{log.arrived[log.long].num_prompt_tokens:,} tokens"
    engine = log.engine
    return Picture(
        cells=cells,
        num_seats=engine.max_num_seqs,
        num_steps=len(log.steps),
        title="The next waiting request takes a freed seat in the next step",
        subtitle=f"{len(log.arrived) - 2} requests at the start, and in the middle of them one with a prompt of "
        f"{tokens}; {engine.max_num_seqs} seats, at most {engine.max_num_batched_tokens} tokens a step; {engine.model}",
        enlarged=chunk,
        label=f"{tokens} in {chunk.length} chunks",
    )


def report_table(log: SeatLog, report: SeatReport) -> Table:
    table = Table(title=f"{log.engine.model}: {log.engine.max_num_seqs} seats", title_justify="left")
    table.add_column("read from the events")
    table.add_column("", justify="right")
    for name, value in asdict(report).items():
        table.add_row(name.replace("_", " "), f"{value:,}")
    table.add_section()
    for claim, holds in report.claims.items():
        table.add_row(claim, "yes" if holds else "NO")
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help=".gguf file or folder; default: the default model")
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--max-num-batched-tokens", type=int, default=256)
    parser.add_argument("--num-kv-blocks", type=int, default=512)
    parser.add_argument("--long-prompt", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    args = parser.parse_args()
    log = EventList()
    config = EngineConfig(
        model=args.model,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        num_kv_blocks=args.num_kv_blocks,
        skip_tokenizer_init=True,
    )
    engine = build_engine(config, events=log)
    requests = make_requests(args.seed, args.long_prompt, engine.facts.model_config.vocab_size)
    seat_log = SeatLog(run(engine, log, requests))
    report = seat_log.report()
    record = {"engine": asdict(seat_log.engine), **asdict(report), "claims": report.claims}
    print_result("seats", vars(args), record, [report_table(seat_log, report)], as_json=args.json)
    if args.svg is not None:
        args.svg.write_text(picture(seat_log).draw(), encoding="utf-8")
    return 0 if all(report.claims.values()) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ChairliftError as error:
        sys.exit(f"error: {error}")
