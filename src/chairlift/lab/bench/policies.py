"""The policies that `chairlift bench compare` compares: a batching policy and a KV memory policy each.

A policy is written as BATCHING/KV, such as static/max or continuous/paged:
    BATCHING   continuous, static, or static-global (static batches decoded to the longest output of all requests)
    KV         paged, exact, max, pow2, oracle
Short names:
    paged, exact, max, pow2, oracle    continuous batching over that memory
    continuous                         continuous/paged, the default of the engine
    static, static-global              static/max and static-global/max, as before Orca and before paging
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from chairlift.config import KV_POLICIES, EngineConfig
from chairlift.errors import ConfigError

DEFAULT_KV: Final = {"continuous": "paged", "static": "max", "static-global": "max"}
"""The KV policy of the short name of each batching policy."""

RUN_TO: Final = {"static": "batch", "static-global": "global"}


@dataclass(frozen=True, slots=True)
class ComparedPolicy:
    """One compared policy.

    Attributes:
        name: the name in the option `--policies`.
        batching: as in `EngineConfig`.
        kv: as in `EngineConfig`.
        static_run_to: as in `EngineConfig`; None for continuous batching.
    """

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
        """The configuration of the engine that runs this policy; other fields are those of `base`.

        Args:
            static_batch_size: applied to static policies only.
            kv_arena: applied to policies that reserve only; None keeps the value of `base`.

        Raises:
            ConfigError: `base` excludes the policy.
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
    """Parse the name of one policy (see the docstring of this module).

    Raises:
        ConfigError: the name is unknown. The message lists the known names.
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
    """Parse two or more names of policies, separated by commas. The first policy is the baseline.

    Raises:
        ConfigError: there are fewer than two policies, one is unknown, or one occurs twice.
    """
    policies = tuple(parse_policy(part) for part in text.split(",") if part.strip())
    if len(policies) < 2:
        raise ConfigError(f"policies must have at least two names, separated by commas, got {text!r}")
    seen: dict[tuple[str, str, str | None], str] = {}
    for policy in policies:
        key = (policy.batching, policy.kv, policy.static_run_to)
        if key in seen:
            raise ConfigError(f"policies {seen[key]!r} and {policy.name!r} are the same policy: leave one of them out")
        seen[key] = policy.name
    return policies
