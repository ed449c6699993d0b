"""The policies that `chairlift bench compare` compares: batching, KV memory and the order of the queue.

A policy is written as BATCHING/KV/ORDER, such as static/max or continuous/paged/srpt:oracle. Without ORDER, the options
of the engine determine the order:
    BATCHING   continuous, static, or static-global (static batches decoded to the longest output of all requests)
    KV         paged, exact, max, pow2, oracle
    ORDER      a scheduling policy, and after a colon a length predictor, if it differs from the options of the engine
Short names:
    paged, exact, max, pow2, oracle    continuous batching over that memory
    continuous                         continuous/paged, the default of the engine
    static, static-global              static/max and static-global/max, as before Orca and before paging
    fcfs, fair, srpt:oracle, ...       continuous/paged in this order
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from chairlift.config import KV_POLICIES, SCHEDULING_POLICIES, EngineConfig
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
        scheduling_policy, length_predictor: as in `EngineConfig`; None keeps the values of the compared engines.
    """

    name: str
    batching: str
    kv: str
    static_run_to: str | None = None
    scheduling_policy: str | None = None
    length_predictor: str | None = None

    @property
    def is_static(self) -> bool:
        return self.batching == "static"

    @property
    def reserves(self) -> bool:
        return self.kv != "paged"

    def config(self, base: EngineConfig, static_batch_size: int | None, kv_arena: str | None) -> EngineConfig:
        """The configuration of the engine that runs this policy; other fields have the values of `base`.

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
            scheduling_policy=self.scheduling_policy or base.scheduling_policy,
            length_predictor=self.length_predictor or base.length_predictor,
            kv=self.kv,
            kv_arena=kv_arena if self.reserves and kv_arena is not None else base.kv_arena,
        )


def parse_policy(text: str) -> ComparedPolicy:
    """Parse the name of one policy (see the docstring of this module).

    Raises:
        ConfigError: the name is unknown. The message lists the known names.
    """
    name = text.strip()
    memory, has_memory, last = name.rpartition("/")
    order, _, predictor = last.partition(":")
    if order not in SCHEDULING_POLICIES:
        memory, order, predictor = name, "", ""
    elif not has_memory:
        memory = "continuous"
    batching, has_kv, kv = memory.partition("/")
    if not has_kv:
        batching, kv = ("continuous", memory) if memory in KV_POLICIES else (memory, DEFAULT_KV.get(memory, ""))
    if batching not in DEFAULT_KV or kv not in KV_POLICIES:
        raise ConfigError(
            f"policy {name!r} is unknown: write {', '.join(KV_POLICIES)} (continuous batching), {', '.join(RUN_TO)} "
            f"(over kv=max), {', '.join(SCHEDULING_POLICIES)} (orders of the queue), or BATCHING/KV/ORDER, where "
            f"BATCHING is one of {', '.join(DEFAULT_KV)}"
        )
    is_static = batching in RUN_TO
    batching, run_to = ("static", RUN_TO[batching]) if is_static else (batching, None)
    return ComparedPolicy(name, batching, kv, run_to, order or None, predictor or None)


def parse_policies(text: str, name: str = "policies") -> tuple[ComparedPolicy, ...]:
    """Parse two or more names of policies, separated by commas. The first policy is the baseline.

    Args:
        name: the name of the option, for the error message.

    Raises:
        ConfigError: there are fewer than two policies, one is unknown, or one occurs twice.
    """
    policies = tuple(parse_policy(part) for part in text.split(",") if part.strip())
    if len(policies) < 2:
        raise ConfigError(f"{name} must have at least two names, separated by commas, got {text!r}")
    seen: dict[ComparedPolicy, str] = {}
    for policy in policies:
        key = replace(policy, name="")
        if key in seen:
            raise ConfigError(f"policies {seen[key]!r} and {policy.name!r} are the same policy: leave one of them out")
        seen[key] = policy.name
    return policies
