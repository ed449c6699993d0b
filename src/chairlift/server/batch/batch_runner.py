"""Runs a batch: many lines at once through the server's application, answers to the output as they come."""

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
from chairlift.server.api.api_options import ApiOptions
from chairlift.server.batch.batch_index import BatchIndex
from chairlift.server.batch.batch_output import BatchOutput
from chairlift.server.batch.line_processor import AnsweredLine, LineProcessor
from chairlift.server.batch.progress import progress_bar
from chairlift.server.http.application import create_app

logger = logging.getLogger("chairlift")

CALLS_PER_SEQUENCE: Final = 2
"""Calls in flight, by the engine's seats: whoever leaves finds somebody waiting."""

MAX_BYTES_IN_FLIGHT: Final = 64 << 20
"""Bytes of lines beyond which no further one is read; each takes several times its size while it is parsed."""

OK: Final = 200


@dataclass(slots=True)
class BatchSummary:
    """What a run did, in lines of the input.

    Attributes:
        before: had their answer in the output already.
        answered: got one with status 200.
        refused: got one with another status, or an error.
        left: have none yet.
        prompt_tokens, completion_tokens: of the answered ones.
        seconds: from the first call to the last answer; loading the model is not in it.
    """

    before: int
    left: int
    answered: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0

    def add(self, answer: AnsweredLine) -> None:
        self.left -= 1
        if answer.status == OK:
            self.answered += 1
        else:
            self.refused += 1
        self.prompt_tokens += answer.prompt_tokens
        self.completion_tokens += answer.completion_tokens

    def sentence(self) -> str:
        """For people."""
        rate = f" ({self.completion_tokens / self.seconds:.0f} output tokens/s)" if self.seconds else ""
        return (
            f"{self.answered} answered, {self.refused} refused, {self.before} done before, {self.left} left; "
            f"{self.prompt_tokens} prompt and {self.completion_tokens} output tokens in {self.seconds:.1f} s{rate}"
        )


def run_batch(
    config: EngineConfig,
    input_file: Path,
    output_file: Path,
    served_model_name: str | None = None,
    api: ApiOptions | None = None,
) -> BatchSummary:
    """AnsweredLine every line of `input_file` that has no answer in `output_file` yet.

    SIGINT and SIGTERM end it early; lines in flight then have no answer, and the next run answers them.

    Raises:
        ConfigError: a file cannot be read or written, a custom_id is there twice, or the output belongs to another
            batch; before the model is loaded.
        EngineDeadError: the engine broke down; the next run goes on.
    """
    index = BatchIndex(input_file)
    output = BatchOutput(output_file, index)
    if output.num_cut:
        logger.info("%s: cut the %d bytes of a torn last line", output_file, output.num_cut)
    summary = BatchSummary(before=output.num_answered, left=index.num_unanswered)
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
        with progress_bar("answers", index.num_unanswered) as advance, _ended_by_signals():

            def written(answer: AnsweredLine) -> None:
                summary.add(answer)
                advance()

            crew = _BatchRunner(LineProcessor(llm, create_app(llm, name, api=api)), index.due(), output, written)
            with suppress(asyncio.CancelledError):
                await crew.run(CALLS_PER_SEQUENCE * llm.engine.scheduler_config.max_num_seqs)
    finally:
        summary.seconds = time.perf_counter() - started
        llm.close()


class _BatchRunner:
    """Keeps calls in flight and writes what they give.

    due lines --> num_calls x answer --> queue, bounded --> one writer --> output
    """

    def __init__(
        self,
        answering: LineProcessor,
        due: Iterator[tuple[int, bytes]],
        output: BatchOutput,
        on_written: Callable[[AnsweredLine], None],
    ) -> None:
        self._answering = answering
        self._due = due
        self._output = output
        self._on_written = on_written
        self._bytes_in_flight = 0
        self._has_room = asyncio.Event()

    async def run(self, num_calls: int) -> None:
        """Until every line is answered and written; if cancelled, until what is answered is written."""
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
        while (due := await self._next_line()) is not None:
            number, line = due
            self._bytes_in_flight += len(line)
            try:
                answer = await self._answering.answer(number, line)
            finally:
                self._bytes_in_flight -= len(line)
                self._has_room.set()
            await answers.put(answer)

    async def _next_line(self) -> tuple[int, bytes] | None:
        """Read a line once those in flight leave room; a single one may take more than there is."""
        while self._bytes_in_flight >= MAX_BYTES_IN_FLIGHT:
            self._has_room.clear()
            await self._has_room.wait()
        return next(self._due, None)

    async def _write(self, answers: asyncio.Queue[AnsweredLine | None]) -> None:
        """All that came meanwhile in one write, off the event loop."""
        is_over = False
        while not is_over:
            got = [await answers.get()]
            while not answers.empty():
                got.append(answers.get_nowait())
            is_over = None in got
            ready = [answer for answer in got if answer is not None]
            await asyncio.to_thread(self._output.append, [answer.line for answer in ready])
            for answer in ready:
                self._on_written(answer)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """The first SIGINT or SIGTERM cancels the task, the second one does what it always does."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    signals = (signal.SIGINT, signal.SIGTERM)

    def end() -> None:
        for number in signals:
            loop.remove_signal_handler(number)
        task.cancel()

    with suppress(NotImplementedError):  # on Windows there are none
        for number in signals:
            loop.add_signal_handler(number, end)
    try:
        yield
    finally:
        with suppress(NotImplementedError):
            for number in signals:
                loop.remove_signal_handler(number)
