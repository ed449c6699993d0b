"""Perplexity of a text, and how far a format is from float32: through the real engine, one window at a time."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch

from chairlift.config import EngineConfig
from chairlift.engine.input_processor import NoTokenizer
from chairlift.engine.startup.factory import build_engine
from chairlift.engine.startup.loaded_model import load_model
from chairlift.errors import ConfigError, RequestError
from chairlift.events import EngineStarted
from chairlift.lab.bench.logits_tap import LogitsTap
from chairlift.lab.bench.machine import MachineFacts, machine_facts, peak_rss_bytes
from chairlift.lab.bench.workload_options import check_at_least
from chairlift.loading.text.tokenizer import Tokenizer
from chairlift.sampling_params import SamplingParams
from chairlift.server.batch.progress import progress_bar

FLOAT32: Final = "float32"
"""As `against`: the same model in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PerplexityOptions:
    """A text, and what to compare with.

    Attributes:
        text: a file in UTF-8.
        window: tokens that the model sees at once. Windows do not overlap; the first token of each is given and the
            others are predicted. The last window is as long as what is left.
        num_windows: only the first so many; None: the whole text.
        against: FLOAT32: the same model with weights, activations and KV memory in float32, on the torch kernels; else
            another model of the same vocabulary, run in that way. None: no comparison.

    Raises:
        ConfigError: naming the option, the value and the limit.
    """

    text: Path
    window: int = 512
    num_windows: int | None = None
    against: str | None = None

    def __post_init__(self) -> None:
        check_at_least("window", self.window, 2)
        check_at_least("num_windows", self.num_windows, 1)


@dataclass(frozen=True, slots=True)
class Comparison:
    """A model beside its reference, over the same predicted tokens.

    Attributes:
        perplexity: the reference's.
        log_ratio: mean difference of negative log-likelihood, nats: the logarithm of perplexity over the reference's.
        log_ratio_stderr: standard error of that mean, as if tokens were independent; None for a single token.
        greedy_agreement: share of the tokens for which both find the same one likeliest.
        mean_kl: mean of KL(reference || model), nats.
    """

    reference: str
    perplexity: float
    log_ratio: float
    log_ratio_stderr: float | None
    greedy_agreement: float
    mean_kl: float


@dataclass(frozen=True, slots=True)
class PerplexityResult:
    """What `run_perplexity` measured, and on what.

    Attributes:
        num_tokens: predicted ones.
        perplexity: exp of their mean negative log-likelihood.
    """

    machine: MachineFacts
    engine: EngineStarted
    options: PerplexityOptions
    num_windows: int
    num_tokens: int
    perplexity: float
    against: Comparison | None
    peak_rss_bytes: int | None

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
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
    """An engine that says how likely every next token was, one window at a time.

    Args:
        window: tokens of the longest window; the KV pool is made for one, if the configuration does not size it.

    Raises:
        ModelLoadError, ConfigError: see `build_engine`.
    """

    def __init__(self, config: EngineConfig, window: int) -> None:
        if config.num_kv_blocks is None and config.kv_cache_memory is None:
            config = replace(config, num_kv_blocks=math.ceil((window + 1) / config.block_size))
        loaded = load_model(config)
        loaded.model = self._tap = LogitsTap(loaded.model)
        self.engine = build_engine(config, loaded=loaded)
        self.vocab_size = loaded.config.vocab_size
        self.tokenizer: Tokenizer | NoTokenizer = loaded.tokenizer

    def logprobs(self, token_ids: list[int]) -> torch.Tensor:
        """float32 [N - 1, V] for N tokens: row i says how likely each token was to follow tokens 0 to i.

        Raises:
            ConfigError: they do not fit the model or the pool, with the arithmetic.
        """
        core = self.engine.core
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=1, prompt_logprobs=0)
        try:
            (request,) = self.engine.input_processor.make("window", token_ids, params, arrival_time=core.now())
        except RequestError as error:
            raise ConfigError(
                f"a window of {len(token_ids)} tokens does not fit: {error} Take a smaller one."
            ) from None
        with self._tap.record() as pieces:
            core.add(request.to_request())
            while core.has_work:
                core.step()
        logits = torch.cat(pieces)
        assert len(logits) == len(token_ids), "one row a prompt token; that of the last one is for the sampled token"
        return logits[:-1].log_softmax(dim=-1)

    def close(self) -> None:
        """End the engine."""
        self.engine.close()


@dataclass(slots=True)
class PerplexityTally:
    """Sums over the predicted tokens: negative log-likelihoods [N] of both models, agreements and divergence."""

    nll: list[torch.Tensor] = field(default_factory=list)
    reference_nll: list[torch.Tensor] = field(default_factory=list)
    num_agreed: int = 0
    kl: float = 0.0

    def add(self, targets: torch.Tensor, logprobs: torch.Tensor, reference: torch.Tensor | None) -> None:
        """Count one window.

        Args:
            targets: int64 [N].
            logprobs, reference: float32 [N, V].
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

    def comparison(self, reference: str) -> Comparison:
        """The figures beside a reference of that name."""
        ours, theirs = torch.cat(self.nll), torch.cat(self.reference_nll)
        differences = ours - theirs
        num_tokens = len(differences)
        stderr = float(differences.std()) / math.sqrt(num_tokens) if num_tokens > 1 else None
        return Comparison(
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
    """Score the text with the engine of `config`, and with the reference if there is one.

    Raises:
        ConfigError: an option that cannot be honoured; a text that cannot be read or has less than two tokens; a
            reference of another vocabulary.
        ModelLoadError: a model cannot be had.
    """
    text = read_text(options.text)
    scorer = Scorer(config, options.window)
    reference: Scorer | None = None
    try:
        windows = split_windows(scorer.tokenizer, text, options)
        if options.against is not None:
            reference = _reference(config, options, scorer.vocab_size)
        tally = score(scorer, reference, windows)
    finally:
        for engine in (scorer, reference):
            if engine is not None:
                engine.close()
    return PerplexityResult(
        machine=machine_facts(),
        engine=scorer.engine.started,
        options=options,
        num_windows=len(windows),
        num_tokens=tally.num_tokens,
        perplexity=tally.perplexity,
        against=None if options.against is None else tally.comparison(options.against),
        peak_rss_bytes=peak_rss_bytes(),
    )


def score(scorer: Scorer, reference: Scorer | None, windows: list[list[int]]) -> PerplexityTally:
    """Both models over all windows; the distributions of one window are held at a time."""
    tally = PerplexityTally()
    with progress_bar("windows", len(windows)) as advance:
        for window in windows:
            logprobs = scorer.logprobs(window)
            targets = torch.tensor(window[1:], device=logprobs.device)
            tally.add(targets, logprobs, None if reference is None else reference.logprobs(window).to(logprobs.device))
            advance()
    return tally


def _reference(config: EngineConfig, options: PerplexityOptions, vocab_size: int) -> Scorer:
    """The model to compare with: nothing of `config` but where it runs."""
    reference = EngineConfig(
        model=config.model if options.against == FLOAT32 else options.against,
        device=config.device,
        dtype="float32",
        kernels="torch",
        random_weights=config.random_weights,
        skip_tokenizer_init=True,
        num_threads=config.num_threads,
    )
    scorer = Scorer(reference, options.window)
    if scorer.vocab_size != vocab_size:
        raise ConfigError(
            f"against={options.against}: its vocabulary has {scorer.vocab_size} tokens and the model's {vocab_size}; "
            f"compare models that share a tokenizer"
        )
    return scorer


def read_text(path: Path) -> str:
    """The file's text.

    Raises:
        ConfigError: it cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"text={path}: cannot be read as UTF-8 text: {error}") from None


def split_windows(tokenizer: Tokenizer | NoTokenizer, text: str, options: PerplexityOptions) -> list[list[int]]:
    """The text's tokens in windows without overlap, each after the beginning token if the model wants one.

    Raises:
        ConfigError: there is nothing to predict.
    """
    assert isinstance(tokenizer, Tokenizer), "the command takes no --skip-tokenizer-init"
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    prefix = bos if tokenizer.encode("")[:1] == bos else []
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    size = options.window - len(prefix)
    pieces = [prefix + token_ids[start : start + size] for start in range(0, len(token_ids), size)]
    windows = [piece for piece in pieces if len(piece) > 1][: options.num_windows]
    if not windows:
        raise ConfigError(f"text={options.text}: has {len(token_ids)} tokens, and nothing is left to predict")
    return windows
