"""GrammarCompiler: compiles each grammar once for a vocabulary, on separate threads, within limits."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Final, NoReturn, TypeAlias, TypeVar

from chairlift.errors import OverloadedError, RequestError
from chairlift.grammar.checker import MEMORY_BYTES, CheckerEndedError, GrammarChecker
from chairlift.grammar.grammar_text import complete_grammar, reject, relax_calls
from chairlift.grammar.vocabulary import GrammarVocabulary
from chairlift.loading.text.tokenizer import Tokenizer
from chairlift.structured_outputs import StructuredOutputs
from chairlift.system.tenant_threads import TenantThreads

# Both are imported with the first grammar, so that a server without structured outputs starts faster.
if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

Result = TypeVar("Result")
Bits: TypeAlias = "npt.NDArray[np.uint32]"
"""A mask with one bit for each token of the vocabulary, the lowest bit of a word first; 1 allows the token."""

COMPILE_SECONDS: Final = 2.0
QUICK_SECONDS: Final = 0.1
"""The processor time after which a compilation continues on the thread of slow grammars. Most grammars take 0.01 s."""

COMPILE_THREADS: Final = 2  # and one for slow grammars
QUEUE_SECONDS: Final = 20.0
MAX_WAITING_PER_TENANT: Final = 1024
MAX_WAITING: Final = 4096
RETRY_SECONDS: Final = 5.0
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
        ignored: the parts of the schemas of tools and of the answer that the grammar does not follow.
    """

    def __init__(self, matcher: LLMatcher | None, ignored: tuple[str, ...] = ()) -> None:
        self._start = matcher
        self.ignored = ignored

    def matcher(self) -> GrammarMatcher:
        """Return a matcher at the start of the grammar, in microseconds."""
        assert self._start is not None, "the compiler only checks grammars"
        return GrammarMatcher(self._start.deep_copy())


class _QuickLimitExceededError(Exception):
    """A compilation takes longer than QUICK_SECONDS."""


@dataclass(slots=True)
class _Compilation:
    """A compilation with the number of calls that wait for it. It is abandoned if all of them have stopped waiting, or
    if the machine was too busy for it.

    Attributes:
        tenants: the tenants whose calls wait for it.
        turns: the turns of the tenants in which it waits; none if it runs or has ended.
        is_slow: whether it takes longer than QUICK_SECONDS.
        seconds_left: the processor seconds that its checks may still take.
        checker: the process that compiles for it now.
    """

    outcome: Future[CompiledGrammar] = field(default_factory=Future)
    num_waiting: int = 0
    tenants: set[str] = field(default_factory=set)
    turns: dict[str, Future[None]] = field(default_factory=dict)
    is_slow: bool = False
    seconds_left: float = QUICK_SECONDS
    is_abandoned: bool = False
    checker: GrammarChecker | None = None


class GrammarCompiler:
    """Compiles grammars for one model. Safe to use from several threads.

    Grammars of different tenants are compiled alternately, one of each tenant at a time. One that takes longer than
    QUICK_SECONDS starts again on a separate thread, so that other grammars, also of its tenant, do not wait for it.

    Args:
        tokenizer: returns the model's tokenizer; called when the first grammar is compiled.
        vocab_size: the width of the model's logits, which may exceed the tokenizer's vocabulary.
        eos_token_ids: the tokens that end an answer, at least one.
        compile_seconds: the maximum processor time to compile one grammar.
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
        self._in_use: dict[int, tuple[weakref.ref[StructuredOutputs], _Compilation]] = {}  # by id of the constraint
        self._num_waiting: Counter[str] = Counter()  # compilations by tenant
        self._threads = TenantThreads(COMPILE_THREADS, "grammar")
        self._slow_thread = TenantThreads(1, "slow-grammar")
        self._thread = threading.local()
        self._ll_tokenizer: LLTokenizer | None = None
        self._tokenizer_lock = threading.Lock()

    def submit(self, constraint: StructuredOutputs, tenant: str = "") -> Future[CompiledGrammar]:
        """Start to compile a constraint, unless that has been done. The future's exception is a RequestError."""
        return self._find_compilation(constraint, tenant).outcome

    def compile(self, constraint: StructuredOutputs) -> CompiledGrammar:
        """Compile a constraint and return its grammar.

        Raises:
            RequestError: the constraint is invalid, uses an unsupported feature, or exceeds a limit.
            OverloadedError: too many constraints wait, or it was not compiled within QUEUE_SECONDS.
        """
        with self._waiting(constraint, "") as compilation:
            try:
                return compilation.outcome.result(QUEUE_SECONDS)
            except FutureTimeoutError:
                raise _overload() from None

    async def compile_in_background(self, constraint: StructuredOutputs, tenant: str = "") -> CompiledGrammar:
        """Compile a constraint as `compile` does, on an event loop, in a turn of the tenant. The work ends if all calls
        for it are cancelled."""
        with self._waiting(constraint, tenant) as compilation:
            try:
                return await _wait(compilation.outcome, QUEUE_SECONDS)
            except TimeoutError:
                raise _overload() from None

    def token_text(self, token_id: int) -> str:
        """The bytes of a token, as the characters with these numbers."""
        return self._get_tokenizer().token_bytes(token_id).decode("latin-1")

    @contextlib.contextmanager
    def _waiting(self, constraint: StructuredOutputs, tenant: str) -> Iterator[_Compilation]:
        """Count a call that waits for a compilation. When the last one leaves early, the compilation is abandoned."""
        compilation = self._find_compilation(constraint, tenant, is_bounded=True)
        try:
            yield compilation
        finally:
            with self._lock:
                compilation.num_waiting -= 1
                if not compilation.num_waiting and not compilation.outcome.done():
                    self._end(constraint, compilation, is_abandoned=True)
                    if compilation.checker is not None:
                        compilation.checker.kill()

    def _find_compilation(self, constraint: StructuredOutputs, tenant: str, is_bounded: bool = False) -> _Compilation:
        """Find or start the compilation of a constraint, which is kept as long as the constraint exists. `is_bounded`:
        the caller waits for it, and the bounds of those that wait apply. Raises OverloadedError."""
        key = id(constraint)
        with self._lock:
            _reference, compilation = self._in_use.get(key) or (None, self._compilations.get(constraint))
            if compilation is None or compilation.is_abandoned:
                compilation = _Compilation()
            if not (compilation.outcome.done() or tenant in compilation.tenants):
                if is_bounded:
                    self._check_waiting(tenant)
                compilation.tenants.add(tenant)
                self._num_waiting[tenant] += 1
                if compilation.turns or len(compilation.tenants) == 1:  # Otherwise it runs.
                    self._take_turn(tenant, constraint, compilation)
            compilation.num_waiting += is_bounded
            self._in_use[key] = weakref.ref(constraint, partial(self._in_use.pop, key)), compilation
            self._compilations[constraint] = compilation
            self._compilations.move_to_end(constraint)
            while len(self._compilations) > MAX_CACHED:
                self._compilations.popitem(last=False)
        return compilation

    def _check_waiting(self, tenant: str) -> None:
        """Raise OverloadedError if a tenant has too many compilations that have not ended. The first one of a tenant is
        always accepted."""
        num_waiting, total = self._num_waiting[tenant], self._num_waiting.total()
        if num_waiting >= MAX_WAITING_PER_TENANT or (num_waiting and total >= MAX_WAITING):
            raise OverloadedError(
                f"structured_outputs: {num_waiting} constraints of this API key, and {total} in all, wait to be "
                f"compiled; the limits are {MAX_WAITING_PER_TENANT} and {MAX_WAITING}. Try again later, or send fewer",
                RETRY_SECONDS,
                "grammar_queue_full",
            )

    def _take_turn(self, tenant: str, constraint: StructuredOutputs, compilation: _Compilation) -> None:
        threads = self._slow_thread if compilation.is_slow else self._threads
        turn = threads.submit(tenant, self._run, tenant, constraint, compilation, compilation.is_slow)
        compilation.turns[tenant] = turn

    def _give_up_turns(self, compilation: _Compilation) -> None:
        turns, compilation.turns = compilation.turns, {}
        for turn in turns.values():
            turn.cancel()

    def _end(self, constraint: StructuredOutputs, compilation: _Compilation, *, is_abandoned: bool) -> None:
        """Stop counting a compilation. Later calls start an abandoned one again."""
        self._give_up_turns(compilation)
        self._num_waiting.subtract(compilation.tenants)
        compilation.tenants.clear()
        compilation.is_abandoned = is_abandoned or compilation.is_abandoned
        if is_abandoned and self._compilations.get(constraint) is compilation:
            del self._compilations[constraint]

    def _run(self, tenant: str, constraint: StructuredOutputs, compilation: _Compilation, is_slow: bool) -> None:
        with self._lock:
            if tenant not in compilation.turns or compilation.is_slow != is_slow:
                return  # It has begun in the turn of another tenant, or is abandoned.
            self._give_up_turns(compilation)
        self._thread.compilation = compilation
        if is_slow:
            compilation.seconds_left = 2 * self.compile_seconds
        outcome: CompiledGrammar | Exception
        try:
            tokenizer = self._llguidance_tokenizer()
            self._start_checker()
            outcome = self._compile_grammar(tokenizer, constraint)
        except _QuickLimitExceededError:
            with self._lock:  # An abandoned compilation has no tenants.
                compilation.is_slow = True
                for each in compilation.tenants:
                    self._take_turn(each, constraint, compilation)
            self._start_checker()  # In this turn, so that other tenants do not wait for it.
            return
        except TimeoutError:
            outcome = _overload()
        except Exception as error:
            outcome = error
        except BaseException as panic:  # A panic of the library must end neither this thread nor the caller's.
            name = f"structured_outputs.{constraint.kind}"
            outcome = RequestError(f"{name} cannot be compiled: {panic}", name)
        with self._lock:
            self._end(constraint, compilation, is_abandoned=isinstance(outcome, OverloadedError))
            if isinstance(outcome, Exception):
                compilation.outcome.set_exception(outcome)
            else:
                compilation.outcome.set_result(outcome)

    def _start_checker(self) -> None:
        if self.has_checker:
            with contextlib.suppress(EOFError, TimeoutError):  # The check tries it again.
                self._checker().start_if_needed()

    def _compile_grammar(self, tokenizer: LLTokenizer, constraint: StructuredOutputs) -> CompiledGrammar:
        if constraint.calls is None:
            return self._compile_unrelaxed(tokenizer, constraint)
        if constraint.kind != "calls":  # An error of the answer's own constraint names it.
            self._compile_unrelaxed(tokenizer, replace(constraint, calls=None))
        try:
            return self._compile_unrelaxed(tokenizer, constraint)
        except RequestError:
            calls, ignored = relax_calls(constraint.calls, partial(self._can_compile, constraint))
            if not ignored:
                raise
            compiled = self._compile_unrelaxed(tokenizer, replace(constraint, calls=calls))
            compiled.ignored += tuple(ignored)
            return compiled

    def _compile_unrelaxed(self, tokenizer: LLTokenizer, constraint: StructuredOutputs) -> CompiledGrammar:
        try:
            text, left_out = complete_grammar(constraint, self._get_tokenizer)
            is_fast = self._is_fast(constraint, text)
        except RequestError:
            raise
        except CheckerEndedError as error:
            limit = f"{MEMORY_BYTES >> 20} MiB"
            reject(constraint, f"{error}: it needs more than {limit}, or the library cannot read a value. Simplify it.")
        except ValueError as error:
            reject(constraint, f"cannot be compiled: {_shortened(str(error))}")
        if not is_fast:
            self._reject_slow(constraint)
        from llguidance import LLMatcher

        matcher = LLMatcher(tokenizer, text, log_level=0, limits=_parser_limits())
        warnings = [] if matcher.is_error() else matcher.get_grammar_warnings()
        problem = matcher.get_error() if matcher.is_error() else "; ".join(warnings)
        # A warning means that llguidance would ignore a part of the constraint. Only the schemas of tools permit that.
        if matcher.is_error() or (problem and constraint.calls is None):
            reject(constraint, f"cannot be compiled: {_shortened(problem)}")
        ignored = (*left_out, *("tools." + warning.split(" ", 1)[0] for warning in warnings))
        if self._is_check_only:
            return CompiledGrammar(None, ignored)
        grammar = CompiledGrammar(matcher, ignored)
        self._probe(constraint, grammar.matcher())
        return grammar

    def _can_compile(self, constraint: StructuredOutputs, lark: str) -> bool:
        from llguidance import LLMatcher

        text = LLMatcher.grammar_from_lark(lark)
        try:
            return self._is_fast(constraint, text) and not LLMatcher.validate_grammar(text, limits=_parser_limits())
        except CheckerEndedError:
            return False

    def _is_fast(self, constraint: StructuredOutputs, text: str) -> bool:
        """Whether the checker of the calling thread compiles a grammar of a constraint in time. Raises RequestError if
        the compilation is abandoned, or has used its time, and CheckerEndedError."""
        if not self.has_checker:
            return True
        checker = self._checker()
        compilation: _Compilation = self._thread.compilation
        with self._lock:
            if compilation.is_abandoned:
                raise RequestError("no call waits for this grammar any more")
            if compilation.seconds_left <= 0:
                self._reject_slow(constraint)
            compilation.checker = checker
        try:
            seconds = checker.seconds_to_compile(text, min(self.compile_seconds, compilation.seconds_left))
        finally:
            with self._lock:
                compilation.checker = None
        compilation.seconds_left -= min(seconds, self.compile_seconds)
        if not compilation.is_slow and not (seconds < math.inf and compilation.seconds_left > 0):
            raise _QuickLimitExceededError
        return seconds < math.inf

    def _checker(self) -> GrammarChecker:
        """The checker of the calling thread."""
        checker: GrammarChecker | None = getattr(self._thread, "checker", None)
        if checker is None:
            checker = self._thread.checker = GrammarChecker(LIMITS)
        return checker

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


def _overload() -> OverloadedError:
    return OverloadedError(
        f"structured_outputs: the constraint was not compiled within {QUEUE_SECONDS:g} s, because others are compiled "
        "or the machine is busy. Try again later, or use a simpler constraint",
        RETRY_SECONDS,
        "grammar_queue_timeout",
    )


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
