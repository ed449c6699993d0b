"""The routing of a mixture of experts: which experts compute a token, and with which weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ExpertSoftmax = Literal["all", "chosen"]


@dataclass(frozen=True, slots=True)
class ExpertRouting:
    """How the logits of a router become the experts of a token and their weights.

    Attributes:
        experts_per_token: the number of experts that compute a token: those with the largest scores, and of equal
            scores the first.
        softmax: "all": a weight is the score of its expert, which is the softmax over the logits of all experts.
            "chosen": it is the score divided by the sum of the scores of the chosen experts, which equals the softmax
            over their logits.
        has_sigmoid: whether a score is the sigmoid of a logit instead.
        sum_eps, sum_min: the number that is added to the sum of "chosen" (DeepSeek-V3), and the least divisor (ERNIE
            4.5). Without sigmoids and without a selection bias the sum is never small, and both are ignored.
        scale: the factor of all weights.
        num_groups, groups_per_token: the number of equal groups of consecutive experts, and how many of them have the
            experts of a token: those with the largest scores. A group has the score of its best expert
            (DeepSeek-V2), or with sigmoids the sum of the scores of its best two (DeepSeek-V3).
    """

    experts_per_token: int
    softmax: ExpertSoftmax
    has_sigmoid: bool = False
    sum_eps: float = 0.0
    sum_min: float = 0.0
    scale: float = 1.0
    num_groups: int = 1
    groups_per_token: int = 1
