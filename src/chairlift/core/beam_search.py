"""BeamSearch: the rules of beam search over the requests of one prompt, which advance together.

    beams    a b c      their best continuations: a1 c7 a4 | b2 a9 ...     the next beams: a1 c7 a4
    forks    a and c continue themselves; b, which has no successor, becomes a copy of a

The rules follow `transformers.generate(num_beams=n)`: a continuation with a stop token is an answer if it is
among the `n` best ones, and the `n` best others are the next beams. Answers are compared by the sum of their logprobs,
divided by the number of their tokens to the power of `length_penalty`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from chairlift.outputs import Logprob, TokenLogprobs
from chairlift.request import Request


class Answer(NamedTuple):
    """A complete output with its score."""

    score: float
    token_ids: list[int]
    logprobs: list[TokenLogprobs]


class BeamMove(NamedTuple):
    """The next token of a beam, and the beam whose sequence it continues, which may be itself."""

    request: Request
    parent: Request
    token_id: int


def replace_tokens(request: Request, token_ids: list[int]) -> None:
    """Replace the sequence of a beam, of which no token is pending."""
    request.token_ids, request.num_tokens = token_ids, len(token_ids)


@dataclass(slots=True)
class _Beam:
    """The sum of the logprobs of a beam, and the logprobs of its tokens."""

    score: float
    logprobs: list[TokenLogprobs]


class BeamSearch:
    """The beams of one prompt, each of which is a request.

    Args:
        members: the leader, which computes the prompt; its siblings are appended before the first step.

    Attributes:
        is_started: the first tokens were chosen, so that each member has its sequence.
        answers: the best complete outputs, in descending order of their scores.
    """

    def __init__(self, members: list[Request]) -> None:
        (leader,) = members
        params = leader.sampling_params
        self.members = members
        self.width = params.n
        self.is_started = False
        self.answers: list[Answer] = []
        self._length_penalty, self._early_stopping = params.length_penalty, params.early_stopping
        self._max_tokens = leader.end_total_tokens - leader.num_prompt_tokens
        self._beams = [_Beam(0.0, [])]
        self._found: dict[str, TokenLogprobs] = {}

    @property
    def leader(self) -> Request:
        return self.members[0]

    @property
    def active(self) -> list[Request]:
        """The members that have a sequence: before the first tokens are chosen only the leader."""
        return self.members if self.is_started else self.members[:1]

    def record(self, request: Request, logprobs: TokenLogprobs) -> None:
        """Keep the likely next tokens of a beam."""
        self._found[request.request_id] = logprobs

    @property
    def can_advance(self) -> bool:
        """The likely next tokens of all beams are known."""
        return len(self._found) == len(self.active)

    def forget_continuations(self) -> None:
        """Forget the likely next tokens, because they will be computed again."""
        self._found.clear()

    def advance(self) -> list[BeamMove]:
        """Choose the next beams; returns their moves, or none if the search has ended and `answers` are complete."""
        leader = self.leader
        num_tokens = leader.num_output_tokens + 1
        ranked = sorted(
            (
                (beam.score + entry.logprob, number, entry)
                for number, (request, beam) in enumerate(zip(self.active, self._beams, strict=True))
                for entry in self._found[request.request_id].top
            ),
            key=lambda continuation: -continuation[0],
        )
        chosen: list[tuple[float, int, Logprob]] = []
        for rank, (score, number, entry) in enumerate(ranked):
            if num_tokens == self._max_tokens or entry.token_id in leader.stop_token_ids:
                if rank < self.width:
                    self._add_answer(score, number, entry, num_tokens)
            elif len(chosen) < self.width:
                chosen.append((score, number, entry))
        if not chosen or self._has_ended(chosen[0][0], num_tokens):
            return []
        moves = self._assign(chosen)
        beams = []
        for place, (index, _move) in enumerate(moves):
            score, number, _entry = chosen[index]
            logprobs = self._beams[number].logprobs
            beams.append(_Beam(score, logprobs if number == place else list(logprobs)))
        for beam, (index, _move) in zip(beams, moves, strict=True):
            beam.logprobs.append(self._record_of(*chosen[index][1:]))
        self._beams = beams
        self._found.clear()
        self.is_started = True
        return [move for _index, move in moves]

    def _record_of(self, number: int, entry: Logprob) -> TokenLogprobs:
        """The logprobs to return for a token, with as many likely ones as were requested."""
        top = self._found[self.members[number].request_id].top
        return TokenLogprobs(entry, top[: self.leader.sampling_params.logprobs or 0])

    def _add_answer(self, score: float, number: int, entry: Logprob, num_tokens: int) -> None:
        request, beam = self.members[number], self._beams[number]
        answer = Answer(
            score / num_tokens**self._length_penalty,
            [*request.token_ids[request.num_prompt_tokens :], entry.token_id],
            [*beam.logprobs, self._record_of(number, entry)],
        )
        self.answers = sorted([*self.answers, answer], key=lambda each: -each.score)[: self.width]

    def _has_ended(self, best_score: float, num_tokens: int) -> bool:
        """Whether there are enough answers, and no beam is expected to become better than the worst of them."""
        if len(self.answers) < self.width:
            return False
        if self._early_stopping is True:
            return True
        if self._early_stopping == "never" and self._length_penalty > 0:
            num_tokens = self._max_tokens
        return bool(best_score / num_tokens**self._length_penalty <= self.answers[-1].score)

    def _assign(self, chosen: list[tuple[float, int, Logprob]]) -> list[tuple[int, BeamMove]]:
        """Assign the chosen continuations to members, in the order of the members. The first continuation of a beam
        stays with it, and the others take the place of beams that have none."""
        kept: dict[int, int] = {}
        for index, (_score, number, _entry) in enumerate(chosen):
            kept.setdefault(number, index)
        forked = iter(index for index in range(len(chosen)) if index not in set(kept.values()))
        moves = []
        for number, request in enumerate(self.members):
            index = kept[number] if number in kept else next(forked)
            _score, parent, entry = chosen[index]
            moves.append((index, BeamMove(request, self.members[parent], entry.token_id)))
        return moves
