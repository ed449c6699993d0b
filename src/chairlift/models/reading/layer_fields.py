"""Readers of properties that the files of many architectures have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from chairlift.errors import ModelLoadError
from chairlift.models.reading.config_fields import REQUIRED, ConfigFields, exact_quotient
from chairlift.models.reading.gguf_header import GGUFHeader

MAX_LAYERS: Final = 4096
MAX_WIDTH: Final = 16
"""The largest width of a convolution."""

DELTA_LAYERS: Final[Mapping[Any, bool]] = {"linear_attention": True, "full_attention": False}
"""Type of a layer -> whether it has recurrent state, in models with a delta rule."""


def read_head_dim(fields: ConfigFields) -> int:
    """Read the head size; if it is absent, it is the hidden size divided by the number of heads."""
    if fields.get("head_dim") is None:
        hidden_size, heads = fields.integer("hidden_size"), fields.uniform("num_attention_heads", ignores_zeros=True)
        head_dim = exact_quotient(fields, "hidden_size", hidden_size, "num_attention_heads", heads)
    else:
        head_dim = fields.integer("head_dim", high=4096)
    if head_dim % 2:
        raise fields.error("head_dim", f"must be even for rotary embeddings, got {head_dim}")
    return head_dim


def read_windows(
    fields: ConfigFields,
    layers: int,
    pattern: int,
    default: Any = REQUIRED,
    is_full: Callable[[int, int], bool] | None = None,
) -> Sequence[int | None]:
    """Read the window of each layer.

    `layer_types` has the type of each layer, and `sliding_window_pattern` is a number n (every n-th layer has no
    window) or, in GGUF files, a Boolean for each layer.

    Args:
        pattern: n in files that contain neither.
        default: the window in a `config.json` that does not contain it.
        is_full: (number of a layer, layers) -> whether it has no window in a `config.json` without types; None for the
            pattern.
    """
    if is_full is not None and not isinstance(fields, GGUFHeader):
        kinds = ["full_attention" if is_full(layer, layers) else "sliding_attention" for layer in range(layers)]
        fields.set_defaults({"layer_types": kinds})
    key, types = "sliding_window_pattern", fields.get("layer_types")
    # Without layers of type "sliding_attention" a file needs no window.
    is_optional = types is not None and default is REQUIRED and fields.get("sliding_window") is None
    window = None if is_optional else fields.window(default)
    if types is not None:
        fields.ignore(key)  # No effect beside layer_types.
        return read_layer_windows(fields, types, layers, window)
    value = fields.get(key)
    if not isinstance(value, list):
        n = fields.integer(key, pattern)
        return tuple(window if (layer + 1) % n else None for layer in range(layers))
    if len(value) != layers or not all(isinstance(item, bool) for item in value):
        raise fields.error(key, f"must be a number or hold true or false for each of {layers} layers, got {value!r}")
    return tuple(window if item else None for item in value)


def read_layer_windows(fields: ConfigFields, types: Any, layers: int, window: int | None) -> Sequence[int | None]:
    """Return the window of each layer, or None for full attention.

    Args:
        types: the value of `layer_types`.
        window: the window of the layers of type "sliding_attention"; None if there may be no such layer.
    """
    known: dict[str, int | None] = {"full_attention": None}
    if window is not None:
        known = {"sliding_attention": window, **known}
    if (
        not isinstance(types, list)
        or len(types) != layers
        or not all(isinstance(kind, str) and kind in known for kind in types)
    ):
        raise fields.error("layer_types", f"must hold {layers} of {', '.join(known)}, got {types!r}")
    return tuple(known[kind] for kind in types)


def read_width(fields: ConfigFields, key: str, default: Any = REQUIRED) -> int:
    """Read the width of a convolution, which GGUF files contain."""
    default = REQUIRED if isinstance(fields, GGUFHeader) else default
    return fields.integer(key, default, low=2, high=MAX_WIDTH)


def check_recurrent_layers(
    fields: ConfigFields, key: str, types: Any, layers: int, known: Mapping[Any, bool]
) -> list[bool]:
    """Return whether each layer has recurrent state, and not attention.

    Args:
        types: the value of `key`, the type of each layer.
        known: the types, and whether they have recurrent state.
    """
    if not isinstance(types, list) or len(types) != layers:
        raise fields.error(key, f"must hold the type of each of {layers} layers, got {types!r:.80}")
    for kind in types:
        if not isinstance(kind, type(next(iter(known)))) or kind not in known:
            supported = ", ".join(map(str, known))
            raise fields.error(key, f"contains {kind!r:.80}, which is not supported; supported: {supported}")
    found = [known[kind] for kind in types]
    if all(found):
        raise without_attention(fields, key, layers)
    return found


def without_attention(fields: ConfigFields, key: str, layers: int) -> ModelLoadError:
    """Return the error of a model whose layers all have recurrent state, such as plain Mamba-2."""
    return fields.error(
        key,
        f"has no layer with attention in {layers} layers, but at least 1 is required, because prefixes are cached by "
        "its blocks of K and V: use a model with attention in some layers, such as Granite 4 H, Nemotron-H or LFM2",
    )


def check_single_score(fields: ConfigFields) -> None:
    """Check that a classifier is a cross-encoder, which has one score; others have several, which have no use here."""
    labels = fields.get("id2label")
    count = len(labels) if isinstance(labels, dict) else fields.get("num_labels", 2)
    if count != 1:
        raise fields.error("id2label", f"must have one label, as cross-encoders do, got {count}")
