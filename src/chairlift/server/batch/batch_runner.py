"""Runs a batch: sends many lines at once to the application of the server, and appends the results to the output."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from chairlift.config import EngineConfig
from chairlift.engine.async_llm import AsyncLLM
from chairlift.engine.progress import progress_bar
from chairlift.server.application import create_app
from chairlift.server.batch.batch_index import BatchIndex
from chairlift.server.batch.batch_output import BatchOutput
from chairlift.server.batch.line_processor import AnsweredLine, LineProcessor
from chairlift.server.preparation.api_options import ApiOptions

logger = logging.getLogger("chairlift")

CALLS_PER_SEQUENCE: Final = 2
"""Calls in flight per seat of the engine, so that a request is waiting whenever a seat becomes free."""

MAX_BYTES_IN_FLIGHT: Final = 64 << 20
"""No further line is read while the lines in flight have this size; parsing needs several times the size of a line."""

OK: Final = 200


@dataclass(slots=True)
class BatchSummary:
    """The outcome of one run, counted in lines of the input.

    Attributes:
        previously_done: lines that already had a result in the output.
        remaining: lines without a result.
        completed: lines answered with status 200.
        failed: lines answered with another status or an error.
        prompt_tokens, completion_tokens: tokens of the lines answered in this run.
        seconds: the time from the first call to the last result, without loading the model.
    """

    previously_done: int
    remaining: int
    completed: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0

    def add(self, answer: AnsweredLine) -> None:
        self.remaining -= 1
        if answer.status == OK:
            self.completed += 1
        else:
            self.failed += 1
        self.prompt_tokens += answer.prompt_tokens
        self.completion_tokens += answer.completion_tokens

    def text(self) -> str:
        """The summary as one line of text."""
        rate = f" ({self.completion_tokens / self.seconds:.0f} output tokens/s)" if self.seconds else ""
        return (
            f"{self.completed} completed, {self.failed} failed, {self.previously_done} done in earlier runs, "
            f"{self.remaining} remaining; "
            f"{self.prompt_tokens} prompt and {self.completion_tokens} output tokens in {self.seconds:.1f} s{rate}"
        )


def run_batch(
    config: EngineConfig,
    input_file: Path,
    output_file: Path,
    served_model_name: str | None = None,
    api: ApiOptions | None = None,
) -> BatchSummary:
    """Answer every line of `input_file` that has no result in `output_file`.

    SIGINT and SIGTERM end the run early; lines in flight then have no result, and the next run answers them.

    Raises:
        ConfigError: a file cannot be read or written, two lines have the same `custom_id`, or the output belongs to
            another batch. Raised before the model is loaded, except for a failed write.
        EngineDeadError: the engine died. The next run resumes the batch.
    """
    index = BatchIndex(input_file)
    output = BatchOutput(output_file, index)
    if output.num_removed_bytes:
        logger.info("%s: removed an incomplete last line of %d bytes", output_file, output.num_removed_bytes)
    summary = BatchSummary(previously_done=output.num_answered, remaining=index.num_unanswered)
    try:
        if index.num_unanswered:
            asyncio.run(_run(AsyncLLM(config), index, output, summary, served_model_name, api))
    finally:
        output.close()
    return summary


async def _run(
    llm: AsyncLLM,
    index: BatchIndex,
    output: BatchOutput,
    summary: BatchSummary,
    name: str | None,
    api: ApiOptions | None,
) -> None:
    started = time.perf_counter()
    try:
        with progress_bar("answers", index.num_unanswered) as advance, _cancelled_by_signals():

            def record(answer: AnsweredLine) -> None:
                summary.add(answer)
                advance()

            processor = LineProcessor(llm, create_app(llm, name, api=api))
            runner = _BatchRunner(processor, index.unanswered(), output, record)
            with suppress(asyncio.CancelledError):
                await runner.run(CALLS_PER_SEQUENCE * llm.engine.facts.scheduler_config.max_num_seqs)
    finally:
        summary.seconds = time.perf_counter() - started
        llm.close()


class _BatchRunner:
    """Keeps calls in flight and writes their results.

    lines --> `num_calls` concurrent calls --> bounded queue --> one writer --> output
    """

    def __init__(
        self,
        processor: LineProcessor,
        lines: Iterator[tuple[int, bytes]],
        output: BatchOutput,
        on_written: Callable[[AnsweredLine], None],
    ) -> None:
        self._processor = processor
        self._lines = lines
        self._output = output
        self._on_written = on_written
        self._bytes_in_flight = 0
        self._has_room = asyncio.Event()

    async def run(self, num_calls: int) -> None:
        """Answer all lines and write their results. If cancelled, write the results that exist."""
        answers: asyncio.Queue[AnsweredLine | None] = asyncio.Queue(num_calls)
        writing = asyncio.ensure_future(self._write(answers))
        calling = asyncio.ensure_future(self._call_all(num_calls, answers))
        try:
            await asyncio.wait({writing, calling}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            calling.cancel()
            await asyncio.wait({calling})
            if not writing.done():
                await answers.put(None)
            await writing
        calling.result()

    async def _call_all(self, num_calls: int, answers: asyncio.Queue[AnsweredLine | None]) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(num_calls):
                    group.create_task(self._call(answers))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _call(self, answers: asyncio.Queue[AnsweredLine | None]) -> None:
        while (numbered := await self._next_line()) is not None:
            number, line = numbered
            self._bytes_in_flight += len(line)
            try:
                answer = await self._processor.answer(number, line)
            finally:
                self._bytes_in_flight -= len(line)
                self._has_room.set()
            await answers.put(answer)

    async def _next_line(self) -> tuple[int, bytes] | None:
        """Read a line once the lines in flight are below MAX_BYTES_IN_FLIGHT; the line itself may exceed the limit."""
        while self._bytes_in_flight >= MAX_BYTES_IN_FLIGHT:
            self._has_room.clear()
            await self._has_room.wait()
        return next(self._lines, None)

    async def _write(self, answers: asyncio.Queue[AnsweredLine | None]) -> None:
        """Append results to the output file on a thread. Results that are available together are one append."""
        is_over = False
        while not is_over:
            arrived = [await answers.get()]
            while not answers.empty():
                arrived.append(answers.get_nowait())
            is_over = None in arrived
            ready = [answer for answer in arrived if answer is not None]
            await asyncio.to_thread(self._output.append, [answer.line for answer in ready])
            for answer in ready:
                self._on_written(answer)


@contextmanager
def _cancelled_by_signals() -> Iterator[None]:
    """Let the first SIGINT or SIGTERM cancel the current task. A second one has its default effect."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    signals = (signal.SIGINT, signal.SIGTERM)

    def cancel() -> None:
        for number in signals:
            loop.remove_signal_handler(number)
        task.cancel()

    for number in signals:
        loop.add_signal_handler(number, cancel)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
