"""What the sampler does to logits, over a whole batch at once. Everything here changes its input in place.

Every filter (min_p, top_k, top_p) is one threshold a row: tokens whose weight lies below it are dropped. A threshold,
unlike a list of token ids, does not depend on how equal tokens happen to be ordered, so equals stay or go together
and no row's outcome depends on the rest of the batch.
"""

from __future__ import annotations

import torch
from torch.nn import functional

NUCLEUS_HEAD_SIZES = (128, 2048)
"""How many of the likeliest tokens are looked at for top_p, before the whole vocabulary is."""

_CDF_GROUP = 256


def apply_penalties(
    logits: torch.Tensor,
    batch_index: torch.Tensor,
    token_ids: torch.Tensor,
    is_output: torch.Tensor,
    penalties: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """Repetition, frequency and presence penalty, touching only tokens that occurred.

    Args:
        logits: float32 [N, V], contiguous.
        batch_index: int64 [P, 1], rows of `logits` with a penalty.
        token_ids: int64 [P, L], the tokens that occurred, any number of times.
        is_output: float32 [P, L], 1 where such a token counts as output.
        penalties: float32 [3, P, 1]: repetition, presence, frequency.
        counts: float32, at least N * V zeros; zero again on return.
    """
    index = batch_index * logits.shape[1] + token_ids
    counts.scatter_add_(0, index.view(-1), is_output.reshape(-1))
    occurrences = counts[index]
    counts[index] = 0.0
    repetition, presence, frequency = penalties
    flat = logits.view(-1)
    values = flat[index]
    values = torch.where(values > 0, values / repetition, values * repetition)
    # A token that occurred twice is written twice, with the same value.
    flat[index] = values - frequency * occurrences - presence * (occurrences > 0)


def weights_(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """exp((logit - largest) / temperature): unnormalised probabilities, 1 for the likeliest.

    The largest is taken off before the division, so a tiny temperature cannot overflow.

    Args:
        logits: float32 [N, V], overwritten.
        temperature: float32 [N].
    """
    return logits.sub_(logits.amax(dim=1, keepdim=True)).div_(temperature[:, None]).exp_()


def filter_(
    weights: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    *,
    max_top_k: int,
    any_top_p: bool,
) -> torch.Tensor:
    """Set the weights of dropped tokens to 0: min_p first, then top_k, then top_p over what is left.

    Args:
        weights: float32 [N, V], as from `weights_`.
        top_k: int64 [N], 0 keeps all.
        top_p: float64 [N], 1 keeps all.
        min_p: float32 [N], 0 keeps all.
        max_top_k, any_top_p: of the arguments, known to the host.
    """
    floor = min_p.clone()
    if max_top_k:
        head = weights.topk(max_top_k, dim=1).values
        kth = head.gather(1, (top_k - 1).clamp_(min=0)[:, None]).squeeze(1)
        floor = torch.where(top_k > 0, torch.maximum(floor, kth), floor)
    weights.masked_fill_(weights < floor[:, None], 0.0)
    if any_top_p:
        weights.masked_fill_(weights < _nucleus_floor(weights, top_p)[:, None], 0.0)
    return weights


def _nucleus_floor(weights: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The smallest weight in the smallest set of tokens that holds `top_p` of all weight; float32 [N].

    Only the head of the distribution is sorted, and a row that is too flat for it tries the next size. The host
    has to look at each outcome; a device that runs ahead of the host would have to stop for that, so it sorts at once.
    """
    vocab_size = weights.shape[1]
    heads = NUCLEUS_HEAD_SIZES if weights.device.type == "cpu" else ()
    sizes = [*(size for size in heads if size < vocab_size), vocab_size]
    target = torch.where(top_p < 1, top_p * weights.sum(dim=1, dtype=torch.float64), 0.0)
    floor = torch.zeros_like(weights[:, 0])
    pending: torch.Tensor | slice = slice(None)
    for size in sizes:
        head = weights[pending].topk(size, dim=1).values
        mass = head.cumsum(dim=1, dtype=torch.float64)
        inside = (mass - head) < target[pending][:, None]
        floor[pending] = head.gather(1, inside.sum(dim=1, keepdim=True).sub_(1).clamp_(min=0)).squeeze(1)
        if size == vocab_size:
            break
        pending = torch.arange(len(weights))[pending][mass[:, -1] < target[pending]]
        if not len(pending):
            break
    return floor.masked_fill_(top_p >= 1, 0.0)


def draw(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Inverse transform sampling: the first token, by id, at which the running sum exceeds uniform * total.

    One random number a row is enough, and tokens of weight 0 are never drawn. The sum runs over groups of tokens
    first and then inside one group, so that only a fraction of the vocabulary is ever in float64.

    Args:
        weights: float32 [N, V], not negative, at least one positive in each row.
        uniforms: float64 [N], in [0, 1).

    Returns:
        int64 [N].
    """
    num_rows, vocab_size = weights.shape
    group = min(_CDF_GROUP, vocab_size)
    padded = functional.pad(weights, (0, -vocab_size % group)) if vocab_size % group else weights
    grouped = padded.view(num_rows, -1, group)
    mass = grouped.sum(dim=2, dtype=torch.float64).cumsum_(dim=1)
    target = uniforms[:, None] * mass[:, -1:]
    chosen = torch.searchsorted(mass, target, right=True).clamp_(max=mass.shape[1] - 1)
    before = torch.where(chosen > 0, mass.gather(1, (chosen - 1).clamp_(min=0)), 0.0)
    inner = grouped[torch.arange(num_rows, device=weights.device), chosen.squeeze(1)].double().cumsum_(dim=1)
    # The two sums of a group may differ in the last bit.
    rest = torch.minimum(target - before, inner[:, -1:] * (1 - 2.0**-52))
    return (chosen * group + torch.searchsorted(inner, rest, right=True)).squeeze(1).clamp_(max=vocab_size - 1)
