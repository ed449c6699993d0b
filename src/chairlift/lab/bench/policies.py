"""What a comparison compares: how requests are batched, and when they get their KV memory.

BATCHING/KV, such as static/max or continuous/paged, of
    continuous, static, static-global (static batches that are decoded to the longest output of all requests)
    paged, exact, max, pow2, oracle
or in short
    paged, exact, max, pow2, oracle    continuous batching over that memory
    continuous                         continuous/paged, the engine's default
    static, static-global              static/max, static-global/max: what systems did before Orca and before paging
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from chairlift.config import KV_POLICIES, EngineConfig
from chairlift.errors import ConfigError

DEFAULT_KV: Final = {"continuous": "paged", "static": "max", "static-global": "max"}
"""By batching, what its short name stands for."""

RUN_TO: Final = {"static": "batch", "static-global": "global"}


@dataclass(frozen=True, slots=True)
class ComparedPolicy:
    """One way to serve; `name` as the user wrote it. `static_run_to` is None for continuous batching."""

    name: str
    batching: str
    kv: str
    static_run_to: str | None = None

    @property
    def is_static(self) -> bool:
        return self.batching == "static"

    @property
    def reserves(self) -> bool:
        return self.kv != "paged"

    def config(self, base: EngineConfig, static_batch_size: int | None, kv_arena: str | None) -> EngineConfig:
        """The engine of this policy, all else as in `base`. The last two go where they mean something.

        Raises:
            ConfigError: the policy cannot go with what `base` says.
        """
        return replace(
            base,
            batching=self.batching,
            static_batch_size=static_batch_size if self.is_static else None,
            static_run_to=self.static_run_to,
            kv=self.kv,
            kv_arena=kv_arena if self.reserves and kv_arena is not None else base.kv_arena,
        )


def parse_policy(text: str) -> ComparedPolicy:
    """The policy that a text names (see the head of this module).

    Raises:
        ConfigError: it names none; says what is known.
    """
    name = text.strip()
    batching, has_kv, kv = name.partition("/")
    if not has_kv:
        batching, kv = ("continuous", name) if name in KV_POLICIES else (name, DEFAULT_KV.get(name, ""))
    if batching not in DEFAULT_KV or kv not in KV_POLICIES:
        raise ConfigError(
            f"policy {name!r} is unknown: write {', '.join(KV_POLICIES)} (continuous batching), {', '.join(RUN_TO)} "
            f"(over kv=max), or BATCHING/KV, where BATCHING is one of {', '.join(DEFAULT_KV)}"
        )
    if batching in RUN_TO:
        return ComparedPolicy(name, "static", kv, RUN_TO[batching])
    return ComparedPolicy(name, batching, kv)


def parse_policies(text: str) -> tuple[ComparedPolicy, ...]:
    """Two or more policies, with commas between them; the first is what the others are compared with.

    Raises:
        ConfigError: fewer than two, an unknown one, or the same one twice.
    """
    policies = tuple(parse_policy(part) for part in text.split(",") if part.strip())
    if len(policies) < 2:
        raise ConfigError(f"policies must name two or more, with commas between them, got {text!r}")
    seen: dict[tuple[str, str, str | None], str] = {}
    for policy in policies:
        key = (policy.batching, policy.kv, policy.static_run_to)
        if key in seen:
            raise ConfigError(f"policies {seen[key]!r} and {policy.name!r} are the same: leave one of them out")
        seen[key] = policy.name
    return policies
