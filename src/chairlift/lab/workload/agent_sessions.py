"""Sessions of agents: turns with tool calls between them, sub-agents, and system prompts that all sessions share.

    session    [system][task] -> call   [result] -> call   [result] -> call      [result] -> answer   [question] -> ...
                                 gap                gap    |         ^      gap                   gap
    sub-agent                                              +-> [system][task] -> call ... -> answer

The next turn is sent when the one before has ended and its tool has run, so the loop is closed. The distributions have
the quantiles that vLLM published of traces of coding agents ("AgentX", 2026): 43 turns in the median session, 142,000
prompt tokens and 444 output tokens in the median request, 96 % of the prompt tokens known from the turn before, and
sub-agents in 44 % of the sessions; 86 % of the next turns come within a second, and 95 % within ten. What is between
these quantiles is a free choice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from chairlift.errors import ConfigError
from chairlift.lab.workload.request import WorkloadRequest
from chairlift.lab.workload.synthetic import random_tokens

SYSTEM_LEN, TASK_LEN, RESULT_LEN, OUTPUT_LEN = 16_000, 2_000, 3_500, 444
"""Tokens of the system prompt with its tools, which all sessions share, and the medians of what differs."""

MEDIAN_TURNS: Final = 43
TURNS_SIGMA: Final = 0.5
SUBAGENT_SHARE: Final = 0.44
SUBAGENT_TURNS: Final = 8
GAPS: Final = ((0.86, 0.05, 1.0), (0.09, 1.0, 10.0), (0.05, 10.0, 600.0))
"""The share of the turns, and the bounds in seconds of the gap before the next one, which is log-uniform between them.
The last row are answers that a person reads."""

ANSWER_GAP: Final = 10.0
CALL_TOKEN, ANSWER_TOKEN = 10, 11
"""The tokens of all outputs that call a tool, and of those that answer a person."""


@dataclass(frozen=True, slots=True)
class AgentSessions:
    """A workload of sessions.

    Attributes:
        num_sessions: number of sessions.
        concurrency: number of sessions at a time; the next one starts when one has ended.
        scale: factor of all lengths in tokens, for smaller models.
        turns: number of turns of the median session.
        max_model_len: a session ends before its context exceeds this number of tokens.

    Raises:
        ConfigError: a value is too small, or the first turn of a session does not fit into max_model_len.
    """

    num_sessions: int
    concurrency: int
    scale: float = 1.0
    turns: int = MEDIAN_TURNS
    max_model_len: int = 400_000

    def __post_init__(self) -> None:
        for name in ("num_sessions", "concurrency", "turns"):
            if getattr(self, name) < 1:
                raise ConfigError(f"agent sessions: {name} must be at least 1, got {getattr(self, name)}")
        if not 0 < 2 * self.scale * SYSTEM_LEN < self.max_model_len:
            limit = self.max_model_len / (2 * SYSTEM_LEN)
            raise ConfigError(
                f"agent sessions: scale={self.scale:g} must be above 0 and below {limit:.3g}, with which two system "
                f"prompts of {SYSTEM_LEN:,} tokens fit into max_model_len={self.max_model_len}"
            )

    def requests(self, seed: int, vocab_size: int) -> list[WorkloadRequest]:
        """All turns in an order in which each is behind those that it follows."""
        rng, requests, last = np.random.default_rng(seed), list[WorkloadRequest](), dict[int, str]()
        systems = [random_tokens(rng, self._scaled(SYSTEM_LEN), vocab_size) for _ in range(2)]
        for number in range(self.num_sessions):
            lane = number % self.concurrency
            requests += self._session(f"s{number}", last.get(lane), systems, rng, vocab_size)
            last[lane] = requests[-1].request_id
        return requests

    def _scaled(self, length: float) -> int:
        return max(1, round(self.scale * length))

    def _session(
        self, name: str, follows: str | None, systems: list[list[int]], rng: np.random.Generator, vocab_size: int
    ) -> list[WorkloadRequest]:
        num_turns = max(1, round(self.turns * rng.lognormal(sigma=TURNS_SIGMA)))
        turns = self._turns(name, follows, systems[0], num_turns, rng, vocab_size)
        if len(turns) == 1 or rng.random() >= SUBAGENT_SHARE:
            return turns
        at = int(rng.integers(1, len(turns)))
        num_turns = min(at, max(1, round(SUBAGENT_TURNS * self.turns / MEDIAN_TURNS)))
        called = self._turns(f"{name}.sub", turns[at - 1].request_id, systems[1], num_turns, rng, vocab_size)
        turns[at] = replace(turns[at], follows=called[-1].request_id)
        return [*turns[:at], *called, *turns[at:]]

    def _turns(
        self, name: str, follows: str | None, system: list[int], count: int, rng: np.random.Generator, vocab_size: int
    ) -> list[WorkloadRequest]:
        """Turns of which each continues the one before, as far as `max_model_len` allows."""
        turns: list[WorkloadRequest] = []
        length, gap, prompt = 0, 0.0, system + random_tokens(rng, self._drawn(TASK_LEN, rng), vocab_size)
        for number in range(count):
            output_len = self._drawn(OUTPUT_LEN, rng)
            length += len(prompt) + output_len
            if turns and length > self.max_model_len:
                break
            turn = WorkloadRequest(f"{name}-{number}", gap, prompt, output_len, output_token=CALL_TOKEN)
            before, gap = turns[-1].request_id if turns else None, _draw_gap(rng)
            turns.append(replace(turn, follows=before, continues=before))
            if gap >= ANSWER_GAP:
                turns[-1] = replace(turns[-1], output_token=ANSWER_TOKEN)
            prompt = random_tokens(rng, self._drawn(RESULT_LEN, rng), vocab_size)
        turns[-1] = replace(turns[-1], output_token=ANSWER_TOKEN)
        turns[0] = replace(turns[0], follows=follows)
        return turns

    def _drawn(self, median: float, rng: np.random.Generator) -> int:
        return min(self._scaled(median * rng.lognormal()), self.max_model_len // 4)


def parse_agent_sessions(text: str, name: str) -> AgentSessions:
    """Parse "NUMBER[,SCALE[,TURNS]]", whose sessions all run at the same time.

    Raises:
        ConfigError: the text has another form, or as `AgentSessions`.
    """
    parts, defaults = text.split(","), ["", "1", str(MEDIAN_TURNS)]
    try:
        number, scale, turns = parts + defaults[len(parts) :]
        values = int(number), float(scale), int(turns)
    except ValueError:
        raise ConfigError(f"{name} must be NUMBER[,SCALE[,TURNS]], such as 64,0.0125,20, got {text!r:.100}") from None
    return AgentSessions(values[0], *values)


def _draw_gap(rng: np.random.Generator) -> float:
    low, high = GAPS[rng.choice(len(GAPS), p=[share for share, _, _ in GAPS])][1:]
    return math.exp(rng.uniform(math.log(low), math.log(high)))
