"""The workloads: one prompt at a time, a burst of requests of mixed lengths, and one stream at a time."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any, Final

from benchmarks.copying_prompts import copying_prompts
from benchmarks.peers.records import BURST, PROMPT, SINGLE, WORKLOADS, Job, PeerRequest

from chairlift.lab.workload.arrivals import ArrivalProcess
from chairlift.lab.workload.lengths import parse_lengths
from chairlift.lab.workload.synthetic import make_workload
from chairlift.loading.model_source import ModelSource

WARM_UP_TOKENS: Final = 8
"""Maximum number of tokens of each answer of the warm-up."""
WARM_UP_PROMPT_TOKENS: Final = 2048
"""Maximum number of tokens of the prompt in the warm-up, because a prompt of 32,768 tokens takes minutes."""
ROUND_STRIDE: Final = 4
"""Number of token rounds of a measured round: one for the warm-up, and one for each workload."""


@dataclass(frozen=True, slots=True)
class PeerWorkload:
    """The requests that every engine receives. Lengths depend only on the seed; tokens differ between rounds.

    Attributes:
        workloads: workloads to run, of `records.WORKLOADS`.
        prompt_len: number of tokens of each prompt of the workload `prompt`, which has one output token.
        num_prompts: number of requests in the burst.
        repeats: number of requests in each of the workloads `prompt` and `single`.
        shared_prefix: number of tokens that all prompts of the burst begin with, in all rounds; the engines then keep
            prefixes in their caches.
        copying: the requests of the workload `single`, whose answers repeat parts of the prompt; if there are none, it
            has random tokens.
    """

    workloads: tuple[str, ...] = (BURST, SINGLE)
    prompt_len: int = 1536
    num_prompts: int = 64
    seed: int = 0
    input_len: str = "lognormal:96,0.7,16..512"
    output_len: str = "exp:96,8..384"
    single_input_len: int = 128
    single_output_len: int = 128
    repeats: int = 3
    shared_prefix: int = 0
    copying: tuple[PeerRequest, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "copying": len(self.copying)}

    @property
    def max_model_len(self) -> int:
        """The number of prompt and output tokens of the longest request of the selected workloads."""
        requests = chain.from_iterable(self._requests(name, 2, 0) for name in self.workloads)
        return max(len(request.prompt_token_ids) + request.output_len for request in requests)

    def job(self, options: dict[str, Any], vocab_size: int, number: int) -> Job:
        """The job of round `number`, from 0, for an engine with these options."""
        first = number * ROUND_STRIDE
        measured = {
            name: self._requests(name, vocab_size, first + i) if name in self.workloads else []
            for i, name in enumerate(WORKLOADS, 1)
        }
        options = {**options, "has_prefix_cache": bool(self.shared_prefix)}
        return Job(options, self._warm_up(vocab_size, first), **measured)

    def _warm_up(self, vocab_size: int, token_round: int) -> list[PeerRequest]:
        """The burst and one request of each other workload, with other prompts and few output tokens. They touch memory
        for the first time, which a server does only at its start."""
        requests = chain.from_iterable(
            self._requests(name, vocab_size, token_round)[: None if name == BURST else 1] for name in self.workloads
        )
        return [
            PeerRequest(
                f"warm-up-{i}",
                request.prompt_token_ids[:WARM_UP_PROMPT_TOKENS],
                min(request.output_len, WARM_UP_TOKENS),
            )
            for i, request in enumerate(requests)
        ]

    def _requests(self, name: str, vocab_size: int, token_round: int) -> list[PeerRequest]:
        if name == SINGLE and self.copying:
            return list(self.copying)
        count, prompt, output = {
            PROMPT: (self.repeats, f"fixed:{self.prompt_len}", "fixed:1"),
            BURST: (self.num_prompts, self.input_len, self.output_len),
            SINGLE: (self.repeats, f"fixed:{self.single_input_len}", f"fixed:{self.single_output_len}"),
        }[name]
        lengths = (parse_lengths(prompt), parse_lengths(output))
        made = make_workload(self.seed, count, *lengths, ArrivalProcess(), vocab_size, token_round=token_round)
        shared: list[int] = []
        if name == BURST and self.shared_prefix:
            prefix = parse_lengths(f"fixed:{self.shared_prefix}")
            shared += make_workload(self.seed, 1, prefix, lengths[1], ArrivalProcess(), vocab_size)[0].prompt_token_ids
        return [PeerRequest(item.request_id, shared + list(item.prompt_token_ids), item.output_len) for item in made]


def copying_requests(files: ModelSource, count: int) -> tuple[PeerRequest, ...]:
    """The first requests whose answers repeat a text of the prompt. An answer has as many tokens as that text."""
    tokenizer = files.tokenizer()
    found = []
    prompts = copying_prompts()
    for index, prompt in enumerate(prompts[:: max(1, len(prompts) // count)][:count]):
        chat = tokenizer.render_chat([{"role": "user", "content": prompt.message}], add_generation_prompt=True)
        tokens = tokenizer.encode(str(chat), add_special_tokens=False)
        found.append(PeerRequest(f"copying-{index}", tokens, len(tokenizer.encode(prompt.text))))
    return tuple(found)
