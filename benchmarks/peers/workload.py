"""The two workloads: a burst of requests of mixed lengths, and one stream at a time."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

from benchmarks.peers.records import BURST, SINGLE, Job, PeerRequest

from chairlift.lab.workload.arrivals import ArrivalProcess
from chairlift.lab.workload.lengths import parse_lengths
from chairlift.lab.workload.synthetic import make_workload

WARM_UP_TOKENS: Final = 8
"""Maximum number of tokens of each answer of the warm-up."""
ROUND_STRIDE: Final = 3
"""Number of token rounds of a measured round: one each for the warm-up, the burst and the single streams."""


@dataclass(frozen=True, slots=True)
class PeerWorkload:
    """The requests that every engine receives. Lengths depend only on the seed; tokens differ between rounds.

    Attributes:
        workloads: workloads to run, of `records.WORKLOADS`.
        single_repeats: number of single streams of single_input_len prompt and single_output_len output tokens.
    """

    workloads: tuple[str, ...] = (BURST, SINGLE)
    num_prompts: int = 64
    seed: int = 0
    input_len: str = "lognormal:96,0.7,16..512"
    output_len: str = "exp:96,8..384"
    single_input_len: int = 128
    single_output_len: int = 128
    single_repeats: int = 3

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def max_model_len(self) -> int:
        """The number of prompt and output tokens of the longest request of both workloads."""
        lengths = [len(r.prompt_token_ids) + r.output_len for r in [*self._burst(2, 0), *self._single(2, 0)]]
        return max(lengths)

    def job(self, options: dict[str, Any], vocab_size: int, number: int) -> Job:
        """The job of round `number`, from 0, for an engine with these options."""
        first = number * ROUND_STRIDE
        burst = self._burst(vocab_size, first + 1) if BURST in self.workloads else []
        single = self._single(vocab_size, first + 2) if SINGLE in self.workloads else []
        return Job(options, self._warm_up(vocab_size, first), burst, single)

    def _warm_up(self, vocab_size: int, token_round: int) -> list[PeerRequest]:
        """The measured requests with other prompts and few output tokens. They touch memory for the first time, which a
        server does only at its start."""
        measured = self._burst if BURST in self.workloads else self._single
        return [
            PeerRequest(f"warm-up-{i}", request.prompt_token_ids, min(request.output_len, WARM_UP_TOKENS))
            for i, request in enumerate(measured(vocab_size, token_round))
        ]

    def _burst(self, vocab_size: int, token_round: int) -> list[PeerRequest]:
        return self._make(self.num_prompts, self.input_len, self.output_len, vocab_size, token_round)

    def _single(self, vocab_size: int, token_round: int) -> list[PeerRequest]:
        lengths = (f"fixed:{self.single_input_len}", f"fixed:{self.single_output_len}")
        return self._make(self.single_repeats, *lengths, vocab_size, token_round)

    def _make(self, count: int, prompt: str, output: str, vocab_size: int, token_round: int) -> list[PeerRequest]:
        lengths = (parse_lengths(prompt), parse_lengths(output))
        made = make_workload(self.seed, count, *lengths, ArrivalProcess(), vocab_size, token_round=token_round)
        return [PeerRequest(item.request_id, list(item.prompt_token_ids), item.output_len) for item in made]
