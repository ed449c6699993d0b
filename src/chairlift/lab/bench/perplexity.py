"""`chairlift bench perplexity`: perplexity of a text, and the distance of a number format from float32.

The engine computes one window of tokens at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import torch

from chairlift.config import EngineConfig
from chairlift.counts import counted
from chairlift.engine.input_processor import NoTokenizer
from chairlift.engine.progress import progress_bar
from chairlift.engine.startup.factory import build_engine
from chairlift.engine.startup.loaded_model import load_decoder
from chairlift.errors import ConfigError, RequestError
from chairlift.lab.bench.bench_options import PerplexityOptions
from chairlift.lab.bench.benchmark_result import BenchmarkResult
from chairlift.lab.metrics.run import ReportedMetric
from chairlift.loading.text.tokenizer import Tokenizer
from chairlift.models.decoder import DecoderModel
from chairlift.sampling_params import SamplingParams

FLOAT32: Final = "float32"
"""Value of `against` that selects the same model in float32."""


METRICS: Final = (
    ReportedMetric("perplexity", "perplexity", "", decimals=4),
    ReportedMetric("reference_perplexity", "perplexity of the reference", "", decimals=4),
    ReportedMetric("change", "change", "%", 100, decimals=2),
    ReportedMetric("change_stderr", "standard error of the change", "%", 100, decimals=2),
    ReportedMetric("greedy_agreement", "same most likely token", "%", 100, decimals=2),
    ReportedMetric("mean_kl", "mean KL divergence", "nats", decimals=6),
)


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
        reference_nll: negative log-likelihoods of the reference, in the same form.
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
            reference: log-probabilities of the reference, float32 [N, V]; or None.
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

    def values(self) -> dict[str, float | None]:
        """The values of METRICS; without a reference, the values of a comparison are missing."""
        values: dict[str, float | None] = {"perplexity": self.perplexity, "num_tokens": self.num_tokens}
        if not self.reference_nll:
            return values
        theirs = torch.cat(self.reference_nll)
        differences = torch.cat(self.nll) - theirs
        has_error = self.num_tokens > 1  # of the mean, if tokens are independent
        return values | {
            "reference_perplexity": math.exp(float(theirs.mean())),
            "change": math.expm1(float(differences.mean())),
            "change_stderr": float(differences.std()) / math.sqrt(self.num_tokens) if has_error else None,
            "greedy_agreement": self.num_agreed / self.num_tokens,
            "mean_kl": self.kl / self.num_tokens,
        }


def _nll(logprobs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return -logprobs.gather(1, targets[:, None])[:, 0].double().cpu()


def run_perplexity(config: EngineConfig, options: PerplexityOptions) -> BenchmarkResult:
    """Score the text with the engine of `config`, and with the reference if `options` has one.

    Raises:
        ConfigError: an option cannot be honoured, the text cannot be read or has less than two tokens, or the
            reference has another vocabulary.
        ModelLoadError: a model cannot be loaded.
    """
    text = read_text(options.text)
    with ExitStack() as engines:
        scorer = Scorer(config, options.window)
        engines.callback(scorer.engine.close)
        windows = split_windows(scorer.tokenizer, text, options)
        reference: Scorer | None = None
        if options.against is not None:
            reference = _reference(config, options, scorer.vocab_size)
            engines.callback(reference.engine.close)
        tally = score(scorer, reference, windows)
    started = scorer.engine.facts.started
    return BenchmarkResult(
        benchmark="perplexity",
        title=f"{started.model}: {options.text.name}, {tally.num_tokens:,} tokens predicted in {len(windows)} windows "
        f"of {options.window}",
        options=options,
        engines={started.model: started},
        runs={started.model: [tally.values()]},
        metrics=METRICS,
        notes=[] if options.against is None else [f"reference: {options.against}"],
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
    except OSError as error:
        raise ConfigError(f"text={path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"text={path}: cannot be read as UTF-8: {error}") from None


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
        length = counted(len(token_ids), "token")
        raise ConfigError(f"text={options.text}: has {length}, which is too short to predict any")
    return windows
