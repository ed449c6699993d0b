"""`chairlift bench perplexity`: perplexity of a text, and the distance of a number format from float32.

The engine computes one window of tokens at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TextIO

import torch

from chairlift.config import EngineConfig
from chairlift.engine.input_processor import NoTokenizer
from chairlift.engine.progress import progress_bar
from chairlift.engine.startup.factory import build_engine
from chairlift.engine.startup.loaded_model import load_decoder
from chairlift.errors import ConfigError, RequestError
from chairlift.events import EngineStarted
from chairlift.lab.bench.bench_options import PerplexityOptions
from chairlift.lab.bench.machine import MachineFacts, machine_caption, machine_facts, peak_rss_bytes
from chairlift.lab.tables import make_table, print_report
from chairlift.loading.text.tokenizer import Tokenizer
from chairlift.models.decoder import DecoderModel
from chairlift.sampling_params import SamplingParams

FLOAT32: Final = "float32"
"""Value of `against` that selects the same model in float32."""


@dataclass(frozen=True, slots=True)
class ReferenceComparison:
    """Differences between a model and its reference over the same predicted tokens.

    Attributes:
        reference: name of the reference.
        perplexity: perplexity of the reference.
        log_ratio: mean difference of the negative log-likelihoods in nats, which is the logarithm of the ratio of the
            perplexities, model to reference.
        log_ratio_stderr: standard error of that mean if tokens are independent; None for a single token.
        greedy_agreement: share of the positions at which both have the same most likely token.
        mean_kl: mean of KL(reference || model) in nats.
    """

    reference: str
    perplexity: float
    log_ratio: float
    log_ratio_stderr: float | None
    greedy_agreement: float
    mean_kl: float


@dataclass(frozen=True, slots=True)
class PerplexityResult:
    """The perplexity of a text, with the machine and the engine that it was measured on.

    Attributes:
        num_windows: number of windows that were scored.
        num_tokens: number of predicted tokens.
        perplexity: exponential of their mean negative log-likelihood.
        against: the comparison with the reference; None without one.
    """

    machine: MachineFacts
    engine: EngineStarted
    options: PerplexityOptions
    num_windows: int
    num_tokens: int
    perplexity: float
    against: ReferenceComparison | None
    peak_rss_bytes: int | None

    def to_dict(self) -> dict[str, Any]:
        """The result for JSON."""
        return {
            "benchmark": "perplexity",
            "machine": self.machine.to_dict(),
            "engine": asdict(self.engine),
            "workload": asdict(self.options),
            "results": {
                "num_windows": self.num_windows,
                "num_tokens": self.num_tokens,
                "perplexity": self.perplexity,
                "against": self.against and asdict(self.against),
            },
            "peak_rss_bytes": self.peak_rss_bytes,
        }


class Scorer:
    """An engine that computes the log-probabilities of all next tokens, one window at a time.

    Args:
        window: tokens of the longest window. If `config` gives no size, the KV pool holds one window.

    Raises:
        ModelLoadError, ConfigError: see `build_engine`.
    """

    def __init__(self, config: EngineConfig, window: int) -> None:
        if config.num_kv_blocks is None and config.kv_cache_memory_bytes is None:
            # Without windows that release blocks, a pool of this size holds the window in all layers.
            num_blocks = math.ceil((window + 1) / config.block_size)
            config = replace(config, num_kv_blocks=num_blocks, disable_hybrid_kv_cache_manager=True)
        loaded = load_decoder(config)
        self._model = loaded.model
        self.engine = build_engine(config, loaded=loaded)
        self.vocab_size = loaded.config.vocab_size
        self.tokenizer: Tokenizer | NoTokenizer = loaded.tokenizer

    def logprobs(self, token_ids: list[int]) -> torch.Tensor:
        """Compute float32 [N - 1, V] for N tokens: row i has the log-probability of each token after tokens 0 to i.

        Raises:
            ConfigError: the tokens do not fit the model or the pool. The message has the arithmetic.
        """
        core = self.engine.core
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=1, prompt_logprobs=0)
        try:
            (request,) = self.engine.input_processor.make("window", token_ids, params, arrival_time=core.now())
        except RequestError as error:
            raise ConfigError(f"a window of {len(token_ids)} tokens does not fit: {error} Reduce window.") from None
        with recorded_logits(self._model) as pieces:
            core.add(request.to_request())
            while core.has_work:
                core.step()
        logits = torch.cat(pieces)
        assert len(logits) == len(token_ids), "there is one row for each token; the last one is for the sampled token"
        return logits[:-1].log_softmax(dim=-1)

    def close(self) -> None:
        """Close the engine."""
        self.engine.close()


@contextmanager
def recorded_logits(model: DecoderModel) -> Iterator[list[torch.Tensor]]:
    """Copy the logits that an engine computes with the model, float32 [rows, V], to the list that is returned."""
    pieces: list[torch.Tensor] = []
    compute_logits = model.logits

    def record(hidden: torch.Tensor) -> torch.Tensor:
        logits = compute_logits(hidden)
        pieces.append(logits.clone())
        return logits

    model.logits = record  # type: ignore[method-assign]
    try:
        yield pieces
    finally:
        del model.logits


@dataclass(slots=True)
class PerplexityTally:
    """Sums over the predicted tokens.

    Attributes:
        nll: negative log-likelihoods of the model, one tensor [N] for each window.
        reference_nll: those of the reference.
        num_agreed: number of positions at which both have the same most likely token.
        kl: sum of KL(reference || model) in nats.
    """

    nll: list[torch.Tensor] = field(default_factory=list)
    reference_nll: list[torch.Tensor] = field(default_factory=list)
    num_agreed: int = 0
    kl: float = 0.0

    def add(self, targets: torch.Tensor, logprobs: torch.Tensor, reference: torch.Tensor | None) -> None:
        """Add one window.

        Args:
            targets: the predicted tokens, int64 [N].
            logprobs: log-probabilities of the model, float32 [N, V].
            reference: those of the reference.
        """
        self.nll.append(_nll(logprobs, targets))
        if reference is not None:
            self.reference_nll.append(_nll(reference, targets))
            self.num_agreed += int((logprobs.argmax(dim=1) == reference.argmax(dim=1)).sum())
            self.kl += float(torch.kl_div(logprobs, reference, log_target=True).sum())

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.nll))

    @property
    def perplexity(self) -> float:
        return math.exp(float(torch.cat(self.nll).mean()))

    def comparison(self, reference: str) -> ReferenceComparison:
        """Compute the differences from the reference with this name."""
        ours, theirs = torch.cat(self.nll), torch.cat(self.reference_nll)
        differences = ours - theirs
        num_tokens = len(differences)
        stderr = float(differences.std()) / math.sqrt(num_tokens) if num_tokens > 1 else None
        return ReferenceComparison(
            reference=reference,
            perplexity=math.exp(float(theirs.mean())),
            log_ratio=float(differences.mean()),
            log_ratio_stderr=stderr,
            greedy_agreement=self.num_agreed / num_tokens,
            mean_kl=self.kl / num_tokens,
        )


def _nll(logprobs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return -logprobs.gather(1, targets[:, None])[:, 0].double().cpu()


def run_perplexity(config: EngineConfig, options: PerplexityOptions) -> PerplexityResult:
    """Score the text with the engine of `config`, and with the reference if `options` has one.

    Raises:
        ConfigError: an option cannot be honoured, the text cannot be read or has less than two tokens, or the
            reference has another vocabulary.
        ModelLoadError: a model cannot be loaded.
    """
    text = read_text(options.text)
    with ExitStack() as engines:
        scorer = engines.enter_context(closing(Scorer(config, options.window)))
        windows = split_windows(scorer.tokenizer, text, options)
        reference: Scorer | None = None
        if options.against is not None:
            reference = engines.enter_context(closing(_reference(config, options, scorer.vocab_size)))
        tally = score(scorer, reference, windows)
    return PerplexityResult(
        machine=machine_facts(),
        engine=scorer.engine.facts.started,
        options=options,
        num_windows=len(windows),
        num_tokens=tally.num_tokens,
        perplexity=tally.perplexity,
        against=None if options.against is None else tally.comparison(options.against),
        peak_rss_bytes=peak_rss_bytes(),
    )


def score(scorer: Scorer, reference: Scorer | None, windows: list[list[int]]) -> PerplexityTally:
    """Score all windows with both models, holding the distributions of one window at a time."""
    tally = PerplexityTally()
    with progress_bar("windows", len(windows)) as advance:
        for window in windows:
            logprobs = scorer.logprobs(window)
            targets = torch.tensor(window[1:], device=logprobs.device)
            tally.add(targets, logprobs, None if reference is None else reference.logprobs(window).to(logprobs.device))
            advance()
    return tally


def _reference(config: EngineConfig, options: PerplexityOptions, vocab_size: int) -> Scorer:
    reference = EngineConfig(
        model=config.model if options.against == FLOAT32 else options.against,
        device=config.device,
        dtype="float32",
        kernels="torch",
        load_format=config.load_format,
        skip_tokenizer_init=True,
        num_threads=config.num_threads,
    )
    scorer = Scorer(reference, options.window)
    if scorer.vocab_size != vocab_size:
        raise ConfigError(
            f"against={options.against}: its vocabulary has {scorer.vocab_size} tokens and the model's {vocab_size}: "
            f"choose a reference with the same tokenizer"
        )
    return scorer


def read_text(path: Path) -> str:
    """Read a file of text.

    Raises:
        ConfigError: the file cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"text={path}: cannot be read as UTF-8 text: {error}") from None


def split_windows(tokenizer: Tokenizer | NoTokenizer, text: str, options: PerplexityOptions) -> list[list[int]]:
    """Tokenize the text and divide it into windows without overlap. Each window starts with the beginning-of-sequence
    token if the tokenizer adds one.

    Raises:
        ConfigError: no window has a token to predict.
    """
    assert isinstance(tokenizer, Tokenizer), "the command has no option --skip-tokenizer-init"
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    prefix = bos if tokenizer.encode("")[:1] == bos else []
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    size = options.window - len(prefix)
    pieces = [prefix + token_ids[start : start + size] for start in range(0, len(token_ids), size)]
    windows = [piece for piece in pieces if len(piece) > 1][: options.num_windows]
    if not windows:
        raise ConfigError(f"text={options.text}: has {len(token_ids)} tokens, which is too short to predict any")
    return windows


def print_perplexity(result: PerplexityResult, file: TextIO | None = None, as_json: bool = False) -> None:
    """Write a table with the perplexity and the comparison, or the JSON line, to `file`."""
    options, against = result.options, result.against
    title = (
        f"{result.engine.model}: {options.text.name}, {result.num_tokens:,} tokens predicted in {result.num_windows} "
        f"windows of {options.window}"
    )
    caption = machine_caption(result.machine, result.peak_rss_bytes)
    table = make_table(title, ["", "value"], caption, min_width=72)
    table.add_row("perplexity", f"{result.perplexity:.4f}")
    if against is not None:
        table.add_row(f"perplexity of {against.reference}", f"{against.perplexity:.4f}")
        table.add_row("change, %", f"{100 * math.expm1(against.log_ratio):+.2f}")
        if against.log_ratio_stderr is not None:
            table.add_row("standard error of the change, %", f"{100 * against.log_ratio_stderr:.2f}")
        table.add_row("same most likely token, %", f"{100 * against.greedy_agreement:.2f}")
        table.add_row("mean KL divergence, nats", f"{against.mean_kl:.6f}")
    print_report([table], result.to_dict(), file, as_json)
