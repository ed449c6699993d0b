"""GrammarCompiler: compiles each grammar once for a vocabulary, on threads of its own, within limits."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, NoReturn, TypeAlias, TypeVar

from chairlift.errors import RequestError
from chairlift.grammar.checker import MEMORY_BYTES, GrammarChecker
from chairlift.grammar.grammar_text import complete_grammar, reject, relax_calls
from chairlift.grammar.vocabulary import GrammarVocabulary
from chairlift.loading.text.tokenizer import Tokenizer
from chairlift.structured_outputs import StructuredOutputs

# Both are imported with the first grammar, so that a server without structured outputs starts faster.
if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

Result = TypeVar("Result")
Bits: TypeAlias = "npt.NDArray[np.uint32]"
"""A mask with one bit for each token of the vocabulary, the lowest bit of a word first; 1 allows the token."""

COMPILE_SECONDS: Final = 2.0
QUEUE_SECONDS: Final = 10.0
COMPILE_THREADS: Final = 2
PROBE_STEPS: Final = 32
PROBE_STRIDE: Final = 7919
MAX_CACHED: Final = 64
MAX_MASK_SECONDS: Final = 0.003
"""The maximum time to compute the mask of one request in one step, for which the whole batch waits."""

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
"""The limits of llguidance: alternatives at one position, work to build a grammar and to advance by one token, and
states of the automaton (1 to 2 kB each). A step at its limit takes several milliseconds."""


def num_words(vocab_size: int) -> int:
    """Return the number of words of `Bits` for a vocabulary."""
    return -(-vocab_size // 32)


class GrammarMatcher:
    """The position of one answer in its grammar.

    It allows EOS where the grammar may end, and only EOS where the grammar must end.

    Attributes:
        error: the reason why the answer cannot continue, or None. With an error, only EOS is allowed.
    """

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self.error: str | None = None

    def advance(self, token_ids: Sequence[int]) -> None:
        """Append tokens of the answer. Tokens after the end of the grammar are ignored."""
        for token_id in token_ids:
            if not self._matcher.is_stopped():
                self._matcher.consume_token(token_id)
        self._note_error()

    def fill(self, bits: Bits) -> None:
        """Write the mask of the tokens that are allowed next to `bits` [words]; at least one bit is set."""
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        self._note_error()

    def _note_error(self) -> None:
        if self.error is None and self._matcher.is_error():
            self.error = _shortened(self._matcher.get_error())


class CompiledGrammar:
    """A compiled grammar. Its matchers share the automaton states that they compute.

    Args:
        matcher: None if the compiler only checks grammars.

    Attributes:
        ignored: the parts of the schemas of tools that the grammar does not follow.
    """

    def __init__(self, matcher: LLMatcher | None, ignored: tuple[str, ...] = ()) -> None:
        self._start = matcher
        self.ignored = ignored

    def matcher(self) -> GrammarMatcher:
        """Return a matcher at the start of the grammar, in microseconds."""
        assert self._start is not None, "the compiler only checks grammars"
        return GrammarMatcher(self._start.deep_copy())


@dataclass(slots=True)
class _Compilation:
    """A compilation with the number of calls that wait for it. It is abandoned if all of them have stopped waiting.

    Attributes:
        checker: the process that compiles for it now.
    """

    started: Future[None] = field(default_factory=Future)
    outcome: Future[CompiledGrammar] = field(default_factory=Future)
    num_waiting: int = 0
    is_abandoned: bool = False
    checker: GrammarChecker | None = None


class GrammarCompiler:
    """Compiles grammars for one model. Safe to use from several threads.

    Args:
        tokenizer: returns the model's tokenizer; called when the first grammar is compiled.
        vocab_size: the width of the model's logits, which may exceed the tokenizer's vocabulary.
        eos_token_ids: the tokens that end an answer, at least one.
        compile_seconds: the maximum time to compile one grammar.
        is_check_only: whether another compiler makes the matchers. This one then keeps only the outcomes. Its
            vocabulary has the special tokens only, which takes a tenth of the memory, and it computes no masks.

    Attributes:
        compile_seconds: as the argument; a change holds for the next compilations.
        has_checker: whether a GrammarChecker compiles new grammars first. It is not needed for grammars that another
            compiler has accepted.
    """

    def __init__(
        self,
        tokenizer: Callable[[], Tokenizer],
        vocab_size: int,
        eos_token_ids: Sequence[int],
        compile_seconds: float = COMPILE_SECONDS,
        *,
        is_check_only: bool = False,
    ) -> None:
        self.has_checker = True
        self._is_check_only = is_check_only
        self.vocab_size = vocab_size
        self._get_tokenizer = tokenizer
        self._eos_token_ids = sorted(token_id for token_id in eos_token_ids if token_id < vocab_size)
        self.compile_seconds = compile_seconds
        self._lock = threading.Lock()
        self._compilations: OrderedDict[StructuredOutputs, _Compilation] = OrderedDict()
        self._pool = ThreadPoolExecutor(COMPILE_THREADS, "grammar")
        self._thread = threading.local()
        self._ll_tokenizer: LLTokenizer | None = None
        self._tokenizer_lock = threading.Lock()

    def submit(self, constraint: StructuredOutputs) -> Future[CompiledGrammar]:
        """Start to compile a constraint, unless that has been done. The future's exception is a RequestError."""
        return self._start_compilation(constraint).outcome

    def compile(self, constraint: StructuredOutputs) -> CompiledGrammar:
        """Compile a constraint and return its grammar.

        Raises:
            RequestError: the constraint is invalid, uses an unsupported feature, or exceeds a limit.
        """
        with self._waiting(constraint) as compilation:
            try:
                compilation.started.result(QUEUE_SECONDS)
                return compilation.outcome.result(2 * self.compile_seconds)
            except FutureTimeoutError:
                self._reject_late(constraint, compilation)

    async def compile_in_background(self, constraint: StructuredOutputs) -> CompiledGrammar:
        """Compile a constraint as `compile` does, on an event loop. The work ends if all calls for it are cancelled."""
        with self._waiting(constraint) as compilation:
            try:
                await _wait(compilation.started, QUEUE_SECONDS)
                return await _wait(compilation.outcome, 2 * self.compile_seconds)
            except TimeoutError:
                self._reject_late(constraint, compilation)

    @contextlib.contextmanager
    def _waiting(self, constraint: StructuredOutputs) -> Iterator[_Compilation]:
        """Count a call that waits for a compilation. When the last one leaves early, the compilation is abandoned."""
        compilation = self._start_compilation(constraint, num_waiting=1)
        try:
            yield compilation
        finally:
            with self._lock:
                compilation.num_waiting -= 1
                if not compilation.num_waiting and not compilation.outcome.done():
                    compilation.is_abandoned = True
                    if self._compilations.get(constraint) is compilation:
                        del self._compilations[constraint]
                    if compilation.checker is not None:
                        compilation.checker.kill()

    def _start_compilation(self, constraint: StructuredOutputs, num_waiting: int = 0) -> _Compilation:
        with self._lock:
            compilation = self._compilations.get(constraint)
            if compilation is None:
                compilation = self._compilations[constraint] = _Compilation()
                self._pool.submit(self._run, constraint, compilation)
                while len(self._compilations) > MAX_CACHED:
                    self._compilations.popitem(last=False)
            self._compilations.move_to_end(constraint)
            compilation.num_waiting += num_waiting
        return compilation

    def _run(self, constraint: StructuredOutputs, compilation: _Compilation) -> None:
        self._thread.compilation = compilation
        try:
            tokenizer = self._llguidance_tokenizer()
            if self.has_checker:
                with contextlib.suppress(EOFError, TimeoutError):  # `can_compile` tries it again.
                    self._checker().start_if_needed()
            compilation.started.set_result(None)
            compilation.outcome.set_result(self._compile_grammar(tokenizer, constraint))
        except Exception as error:
            compilation.outcome.set_exception(error)
        except BaseException as panic:  # A panic of the library must end neither this thread nor the caller's.
            name = f"structured_outputs.{constraint.kind}"
            compilation.outcome.set_exception(RequestError(f"{name} cannot be compiled: {panic}", name))
        finally:
            if not compilation.started.done():
                compilation.started.set_result(None)

    def _compile_grammar(self, tokenizer: LLTokenizer, constraint: StructuredOutputs) -> CompiledGrammar:
        if constraint.calls is None:
            return self._compile_unrelaxed(tokenizer, constraint)
        if constraint.kind != "calls":  # An error of the answer's own constraint names it.
            self._compile_unrelaxed(tokenizer, replace(constraint, calls=None))
        try:
            return self._compile_unrelaxed(tokenizer, constraint)
        except RequestError:
            calls, ignored = relax_calls(constraint.calls, self._can_compile)
            if not ignored:
                raise
            compiled = self._compile_unrelaxed(tokenizer, replace(constraint, calls=calls))
            compiled.ignored += tuple(ignored)
            return compiled

    def _compile_unrelaxed(self, tokenizer: LLTokenizer, constraint: StructuredOutputs) -> CompiledGrammar:
        try:
            text = complete_grammar(constraint, self._get_tokenizer)
        except RequestError:
            raise
        except ValueError as error:
            reject(constraint, f"cannot be compiled: {_shortened(str(error))}")
        if not self._is_fast(text):
            self._reject_slow(constraint)
        from llguidance import LLMatcher

        matcher = LLMatcher(tokenizer, text, log_level=0, limits=_parser_limits())
        warnings = [] if matcher.is_error() else matcher.get_grammar_warnings()
        problem = matcher.get_error() if matcher.is_error() else "; ".join(warnings)
        # A warning means that llguidance would ignore a part of the constraint. Only the schemas of tools permit that.
        if matcher.is_error() or (problem and constraint.calls is None):
            reject(constraint, f"cannot be compiled: {_shortened(problem)}")
        ignored = tuple("tools." + warning.split(" ", 1)[0] for warning in warnings)
        if self._is_check_only:
            return CompiledGrammar(None, ignored)
        grammar = CompiledGrammar(matcher, ignored)
        self._probe(constraint, grammar.matcher())
        return grammar

    def _can_compile(self, lark: str) -> bool:
        from llguidance import LLMatcher

        text = LLMatcher.grammar_from_lark(lark)
        return self._is_fast(text) and not LLMatcher.validate_grammar(text, limits=_parser_limits())

    def _is_fast(self, text: str) -> bool:
        """Whether the checker of the calling thread compiles a grammar in time. Raises RequestError if the compilation
        is abandoned."""
        if not self.has_checker:
            return True
        checker = self._checker()
        compilation: _Compilation = self._thread.compilation
        with self._lock:
            if compilation.is_abandoned:
                raise RequestError("no call waits for this grammar any more")
            compilation.checker = checker
        try:
            return checker.can_compile(text, self.compile_seconds)
        finally:
            with self._lock:
                compilation.checker = None

    def _checker(self) -> GrammarChecker:
        """The checker of the calling thread."""
        checker: GrammarChecker | None = getattr(self._thread, "checker", None)
        if checker is None:
            checker = self._thread.checker = GrammarChecker(LIMITS)
        return checker

    def _reject_late(self, constraint: StructuredOutputs, compilation: _Compilation) -> NoReturn:
        if not compilation.started.done():
            reject(constraint, f"waited {QUEUE_SECONDS:g} s for other constraints to be compiled. Try again later.")
        self._reject_slow(constraint)

    def _reject_slow(self, constraint: StructuredOutputs) -> NoReturn:
        limits = f"{self.compile_seconds:g} s, or more than {MEMORY_BYTES >> 20} MiB,"
        reject(constraint, f"takes longer than {limits} to compile. Simplify it.")

    def _probe(self, constraint: StructuredOutputs, matcher: GrammarMatcher) -> None:
        """Compute masks along one path from the start of the grammar, and reject the constraint if one is too slow.

        The first masks take longest, later matchers reuse them, and most grammars that are too complex are so from the
        start.
        """
        import numpy as np

        if (reasoning := constraint.reasoning) is not None:
            thoughts = reasoning.closing if reasoning.is_inside else reasoning.opening + reasoning.closing
            matcher.advance(self._get_tokenizer().encode(thoughts, add_special_tokens=False))
        bits: Bits = np.zeros(num_words(self.vocab_size), np.uint32)
        for step in range(PROBE_STEPS):
            if (seconds := _seconds_of_mask(matcher, bits)) > MAX_MASK_SECONDS:
                reject(
                    constraint,
                    f"is too complex: computing the tokens that are allowed next takes {1e3 * seconds:.1f} ms, and the "
                    f"limit is {1e3 * MAX_MASK_SECONDS:g} ms. Simplify it, for example by smaller repetition counts.",
                )
            if matcher.error is not None:
                limits = ", ".join(f"{name} {value}" for name, value in LIMITS.items())
                reject(constraint, f"is too complex: {matcher.error} (limits: {limits})")
            token_ids = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
            token_id = int(token_ids[step * PROBE_STRIDE % len(token_ids)])
            if token_id in self._eos_token_ids:
                return
            matcher.advance([token_id])

    def _llguidance_tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        with self._tokenizer_lock:
            if self._ll_tokenizer is None:
                special_only = self._is_check_only
                vocabulary = GrammarVocabulary(
                    self._get_tokenizer(), self.vocab_size, self._eos_token_ids[0], special_only=special_only
                )
                slices: list[str] | None = [] if special_only else None
                self._ll_tokenizer = LLTokenizer(vocabulary, self.vocab_size, self._eos_token_ids, slices)  # type: ignore[arg-type]
            return self._ll_tokenizer


async def _wait(future: Future[Result], seconds: float) -> Result:
    """Wait for a future without cancelling it. Raises TimeoutError.

    `asyncio.wait_for` loses a cancellation that arrives together with the result (before Python 3.12).
    """
    async with asyncio.timeout(seconds):
        return await asyncio.shield(asyncio.wrap_future(future))


def _parser_limits() -> LLParserLimits:
    from llguidance import LLParserLimits

    return LLParserLimits(**LIMITS, verbose_errors=False)  # type: ignore[arg-type]


def _seconds_of_mask(matcher: GrammarMatcher, bits: Bits) -> float:
    """Return the processor seconds to compute one mask, the minimum of several trials. The time for which other
    programs have the processor does not count."""
    shortest = math.inf
    for _ in range(MASK_TRIALS):
        started = time.thread_time()
        matcher.fill(bits)
        shortest = min(shortest, time.thread_time() - started)
        if shortest <= MAX_MASK_SECONDS:
            break
    return shortest


def _shortened(message: str) -> str:
    message = " ".join(message.split())
    return message if len(message) <= MAX_MESSAGE else message[:MAX_MESSAGE] + " ..."
