"""Grammars compiled for a vocabulary: off the caller's thread, once each, within limits."""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NoReturn, TypeAlias

from chairlift.errors import RequestError
from chairlift.grammar.checker import MEMORY_BYTES, GrammarChecker
from chairlift.grammar.reasoning import after_reasoning
from chairlift.grammar.source import grammar_text, refuse
from chairlift.grammar.vocabulary import Vocabulary
from chairlift.loading.text.tokenizer import Tokenizer
from chairlift.structured_outputs import StructuredOutputs
from chairlift.system.cpu_account import CpuCharge, charge_cpu_time_to, cpu_charge

# A front end that serves no grammar loads neither.
if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from llguidance import LLMatcher, LLTokenizer

Bits: TypeAlias = "npt.NDArray[np.uint32]"
"""One bit a token of the vocabulary, the lowest bit of a word first; 1 allows the token."""

COMPILE_SECONDS: Final = 2.0
QUEUE_SECONDS: Final = 10.0
COMPILE_THREADS: Final = 2
PROBE_STEPS: Final = 32
PROBE_STRIDE: Final = 7919
MAX_CACHED: Final = 64
MAX_MASK_SECONDS: Final = 0.003
"""For the mask of one step of one request; every request of the batch waits for it."""

MASK_TRIALS: Final = 5
MAX_MESSAGE: Final = 600
LIMITS: Final[dict[str, int]] = {
    "max_items_in_row": 2_000,
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 10_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 200_000,
}
"""llguidance's limits: alternatives at one place, work to build and to go one step, and automaton states (1 to 2 kB
each). A step at its limit takes several milliseconds."""


def num_words(vocab_size: int) -> int:
    """Words of `Bits` for a vocabulary."""
    return -(-vocab_size // 32)


class Matcher:
    """Where one answer stands in its grammar. EOS is allowed where the grammar may end, and alone where it has to.

    Attributes:
        error: why it cannot go on; then it allows EOS alone.
    """

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self.error: str | None = None

    def advance(self, token_ids: Sequence[int]) -> None:
        """Take in tokens of the answer. What follows the end is not looked at."""
        for token_id in token_ids:
            if not self._matcher.is_stopped():
                self._matcher.consume_token(token_id)
        self._note_error()

    def fill(self, bits: Bits) -> None:
        """Overwrite `bits` [words] with the tokens that may come next; at least one bit is set."""
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        self._note_error()

    def _note_error(self) -> None:
        if self.error is None and self._matcher.is_error():
            self.error = _shortened(self._matcher.get_error())


class CompiledGrammar:
    """A grammar at its beginning. Its matchers share what they find out about it."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._start = matcher

    def matcher(self) -> Matcher:
        """For one more answer; takes microseconds."""
        return Matcher(self._start.deep_copy())


@dataclass(slots=True)
class _Compilation:
    started: threading.Event = field(default_factory=threading.Event)
    outcome: Future[CompiledGrammar] = field(default_factory=Future)


class GrammarCompiler:
    """Compiles grammars for one model. Safe to use from several threads.

    Args:
        tokenizer: gives the tokenizer of whose tokens the answers are made; called for the first grammar.
        vocab_size: of the model's logits, which may be wider than the tokenizer's vocabulary.
        eos_token_ids: at least one; these end an answer.
        compile_seconds: what a grammar may take.

    Attributes:
        is_checking: whether new grammars are tried in a process of their own first; not needed for grammars that
            another compiler has let through.
    """

    def __init__(
        self,
        tokenizer: Callable[[], Tokenizer],
        vocab_size: int,
        eos_token_ids: Sequence[int],
        compile_seconds: float = COMPILE_SECONDS,
    ) -> None:
        self.is_checking = True
        self.vocab_size = vocab_size
        self._source = tokenizer
        self._eos_token_ids = sorted(token_id for token_id in eos_token_ids if token_id < vocab_size)
        self._compile_seconds = compile_seconds
        self._lock = threading.Lock()
        self._known: OrderedDict[StructuredOutputs, _Compilation] = OrderedDict()
        self._pool = ThreadPoolExecutor(COMPILE_THREADS, "grammar")
        self._thread = threading.local()
        self._tokenizer: LLTokenizer | None = None
        self._tokenizer_lock = threading.Lock()

    def submit(self, constraint: StructuredOutputs) -> Future[CompiledGrammar]:
        """Begin to compile, unless it is known. The future's exception is a RequestError. The CPU time is charged to
        the account of the thread that submits a grammar first."""
        return self._compilation(constraint).outcome

    def compile(self, constraint: StructuredOutputs) -> CompiledGrammar:
        """The grammar, once it is compiled.

        Raises:
            RequestError: it is wrong, asks for what is not supported, or exceeds a limit.
        """
        compilation = self._compilation(constraint)
        if not compilation.started.wait(QUEUE_SECONDS):
            refuse(constraint, f"was not looked at for {QUEUE_SECONDS:g} s: others are being compiled. Try again.")
        try:
            return compilation.outcome.result(2 * self._compile_seconds)
        except FutureTimeoutError:
            self._refuse_slow(constraint)

    def _compilation(self, constraint: StructuredOutputs) -> _Compilation:
        with self._lock:
            compilation = self._known.get(constraint)
            if compilation is None:
                compilation = self._known[constraint] = _Compilation()
                self._pool.submit(self._run, constraint, compilation, cpu_charge())
                while len(self._known) > MAX_CACHED:
                    self._known.popitem(last=False)
            self._known.move_to_end(constraint)
        return compilation

    def _run(self, constraint: StructuredOutputs, compilation: _Compilation, charge: CpuCharge) -> None:
        try:
            tokenizer = self._llguidance_tokenizer()
            compilation.started.set()
            with charge_cpu_time_to(charge):
                grammar = self._compiled(tokenizer, constraint)
            compilation.outcome.set_result(grammar)
        except Exception as error:
            compilation.outcome.set_exception(error)
        except BaseException as panic:  # the library's own, which would end the thread of whoever waits
            name = f"structured_outputs.{constraint.kind}"
            compilation.outcome.set_exception(RequestError(f"{name} cannot be compiled: {panic}", name))
        finally:
            compilation.started.set()

    def _compiled(self, tokenizer: LLTokenizer, constraint: StructuredOutputs) -> CompiledGrammar:
        try:
            text = grammar_text(constraint)
        except RequestError:
            raise
        except ValueError as error:
            refuse(constraint, f"cannot be honoured: {_shortened(str(error))}")
        if constraint.reasoning is not None:
            text = after_reasoning(constraint, text, self._source())
        if self.is_checking and not self._checker().ends_in_time(text):
            self._refuse_slow(constraint)
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(**LIMITS, verbose_errors=False)  # type: ignore[arg-type]
        matcher = LLMatcher(tokenizer, text, log_level=0, limits=limits)
        self._check(constraint, matcher)
        grammar = CompiledGrammar(matcher)
        self._probe(constraint, grammar.matcher())
        return grammar

    def _checker(self) -> GrammarChecker:
        checker: GrammarChecker | None = getattr(self._thread, "checker", None)
        if checker is None:
            checker = self._thread.checker = GrammarChecker(LIMITS, self._compile_seconds)
        return checker

    def _refuse_slow(self, constraint: StructuredOutputs) -> NoReturn:
        limits = f"{self._compile_seconds:g} s, or more than {MEMORY_BYTES >> 20} MiB,"
        refuse(constraint, f"takes longer than {limits} to compile. Simplify it.")

    def _probe(self, constraint: StructuredOutputs, matcher: Matcher) -> None:
        """Walk some way into the grammar. The first masks are the dearest, later matchers find them done, and what is
        too complex mostly is so from the beginning."""
        import numpy as np

        if (reasoning := constraint.reasoning) is not None:
            thoughts = reasoning.closing if reasoning.is_inside else reasoning.opening + reasoning.closing
            matcher.advance(self._source().encode(thoughts, add_special_tokens=False))
        bits: Bits = np.zeros(num_words(self.vocab_size), np.uint32)
        for step in range(PROBE_STEPS):
            if (seconds := _seconds_of_mask(matcher, bits)) > MAX_MASK_SECONDS:
                refuse(
                    constraint,
                    f"is too complex: finding the tokens that may come next takes {1e3 * seconds:.1f} ms, and at most "
                    f"{1e3 * MAX_MASK_SECONDS:g} ms are allowed, because every token waits for it. Simplify it, for "
                    "example by smaller counts of repetitions.",
                )
            if matcher.error is not None:
                refuse(constraint, f"is too complex: {matcher.error} (limits: {_limits_text()})")
            token_ids = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
            token_id = int(token_ids[step * PROBE_STRIDE % len(token_ids)])
            if token_id in self._eos_token_ids:
                return
            matcher.advance([token_id])

    def _check(self, constraint: StructuredOutputs, matcher: LLMatcher) -> None:
        """A warning says that a part of the constraint would be ignored."""
        if matcher.is_error():
            refuse(constraint, f"cannot be honoured: {_shortened(matcher.get_error())}")
        if warnings := matcher.get_grammar_warnings():
            refuse(constraint, f"cannot be honoured: {_shortened('; '.join(warnings))}")

    def _llguidance_tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        with self._tokenizer_lock:
            if self._tokenizer is None:
                vocabulary = Vocabulary(self._source(), self.vocab_size, self._eos_token_ids[0])
                self._tokenizer = LLTokenizer(vocabulary, self.vocab_size, self._eos_token_ids)  # type: ignore[arg-type]
            return self._tokenizer


def _seconds_of_mask(matcher: Matcher, bits: Bits) -> float:
    """Seconds for one mask: the least of several, since the first one is built and other programs run too."""
    shortest = math.inf
    for _ in range(MASK_TRIALS):
        started = time.perf_counter()
        matcher.fill(bits)
        shortest = min(shortest, time.perf_counter() - started)
        if shortest <= MAX_MASK_SECONDS:
            break
    return shortest


def _shortened(message: str) -> str:
    message = " ".join(message.split())
    return message if len(message) <= MAX_MESSAGE else message[:MAX_MESSAGE] + " ..."


def _limits_text() -> str:
    return ", ".join(f"{name} {value}" for name, value in LIMITS.items())
