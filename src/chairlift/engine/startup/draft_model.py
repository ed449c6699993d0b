"""Loads the draft model of speculative decoding."""

from __future__ import annotations

from chairlift.config import EngineConfig
from chairlift.core.kv.kv_cache_manager import FULL
from chairlift.engine.startup.loaded_model import LoadedDecoder, load_decoder
from chairlift.engine.startup.memory_plan import draft_config
from chairlift.errors import ConfigError
from chairlift.loading.text.tokenizer import Tokenizer
from chairlift.models.kv_layout import KVLayout


def provide_draft_model(config: EngineConfig, loaded: LoadedDecoder, layout: KVLayout) -> LoadedDecoder | None:
    """The draft model that `config.speculative_config` names, which is loaded once for each loaded model; None if there
    is none.

    Raises:
        ModelLoadError: the draft model cannot be found, read or run.
        ConfigError: it does not fit the model.
    """
    speculative = config.speculative
    if speculative is None or speculative.model is None:
        return None
    if layout.windows != FULL:
        raise ConfigError(
            "speculative_config: a draft model needs K and V of all tokens, and this model releases those that left a "
            "sliding window: set disable_hybrid_kv_cache_manager, or use method=ngram"
        )
    draft = loaded.draft
    if draft is None or not draft.matches(draft_config(config, speculative)):
        draft = load_decoder(draft_config(config, speculative))
    _check(draft, loaded, config.max_model_len or loaded.config.max_position_embeddings)
    loaded.draft = draft
    return draft


def _check(draft: LoadedDecoder, loaded: LoadedDecoder, max_model_len: int) -> None:
    """Check that token ids of the draft model mean the same in the model, and that its context is long enough."""
    ours, theirs = draft.tokenizer, loaded.tokenizer
    problem = None
    if draft.config.vocab_size != loaded.config.vocab_size:
        problem = f"it has {draft.config.vocab_size} tokens, and {loaded.name} has {loaded.config.vocab_size}"
    elif isinstance(ours, Tokenizer) and isinstance(theirs, Tokenizer) and not ours.has_vocabulary_of(theirs):
        problem = f"its tokenizer differs from that of {loaded.name}"
    elif (context := draft.config.max_position_embeddings) < max_model_len:
        problem = f"its context has {context} tokens, fewer than the {max_model_len} of a request: lower max_model_len"
    if problem is not None:
        raise ConfigError(
            f"speculative_config: {draft.name} cannot be the draft model, because {problem}: use a smaller model of "
            "the same family, or method=ngram"
        )
