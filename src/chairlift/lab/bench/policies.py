"""The policies that `chairlift bench compare` compares: batching, KV memory and the order of the queue.

A policy is written as BATCHING/KV/ORDER, such as static/max or continuous/paged/srpt:oracle. Without ORDER, the options
of the engine determine the order:
    BATCHING   continuous, static, or static-global (static batches decoded to the longest output of all requests)
    KV         paged, exact, max, pow2, oracle, or module:Class
    ORDER      a scheduling policy or module:Class, and after a colon a length predictor, if it differs from the options
               of the engine
Short names:
    paged, exact, max, pow2, oracle    continuous batching over that memory
    continuous                         continuous/paged, the default of the engine
    static, static-global              static/max and static-global/max, as before Orca and before paging
    fcfs, fair, srpt:oracle, ...       continuous/paged in this order
    module:Class                       continuous/paged in this order, or continuous batching over this memory
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

from chairlift.config import KV_POLICIES, SCHEDULING_POLICIES, EngineConfig
from chairlift.errors import ConfigError
from chairlift.policy_class import KV_BASE, has_base, is_paged, load_class, queue_class

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
        names_kv: whether the name has the KV policy, which is otherwise the default of the batching policy.
    """

    name: str
    batching: str
    kv: str
    static_run_to: str | None = None
    scheduling_policy: str | None = None
    length_predictor: str | None = None
    names_kv: bool = field(default=False, compare=False)

    @property
    def is_static(self) -> bool:
        return self.batching == "static"

    @property
    def reserves(self) -> bool:
        return not is_paged(self.kv)

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
        ConfigError: the name is unknown, and the message lists the known names; or as `load_class`.
    """
    name = text.strip()
    parts = [_parse_part(part) for part in name.split("/")]
    found = {key: value for part in parts for key, value in part.items()}
    order = [key for key in ("batching", "kv", "scheduling_policy") if key in found]
    if [next(iter(part), "") for part in parts] != order:
        raise ConfigError(
            f"policy {name!r} is unknown: write {', '.join(KV_POLICIES)} (continuous batching), {', '.join(RUN_TO)} "
            f"(over kv=max), {', '.join(SCHEDULING_POLICIES)} (orders of the queue), module:Class, or "
            f"BATCHING/KV/ORDER, where BATCHING is one of {', '.join(DEFAULT_KV)}"
        )
    batching, names_kv = found.pop("batching", "continuous"), "kv" in found
    kv = found.pop("kv", DEFAULT_KV[batching])
    run_to = RUN_TO.get(batching)
    return ComparedPolicy(name, "continuous" if run_to is None else "static", kv, run_to, **found, names_kv=names_kv)


def _parse_part(part: str) -> dict[str, str]:
    """The fields of a policy that a part of its name between slashes has; none if it is unknown."""
    order, has_predictor, predictor = part.partition(":")
    if part in DEFAULT_KV:
        return {"batching": part}
    if part in KV_POLICIES:
        return {"kv": part}
    if order not in SCHEDULING_POLICIES and has_predictor:
        class_name, has_predictor, predictor = predictor.partition(":")
        order = f"{order}:{class_name}"
        if has_base(load_class(order, "policies"), KV_BASE):
            return {} if has_predictor else {"kv": part}
        queue_class(order)
    elif order not in SCHEDULING_POLICIES:
        return {}
    return {"scheduling_policy": order} | ({"length_predictor": predictor} if has_predictor else {})


def parse_policies(text: str, name: str = "policies") -> tuple[ComparedPolicy, ...]:
    """Parse one or more names of policies, separated by commas. The first policy is the baseline.

    Args:
        name: the name of the option, for the error message.

    Raises:
        ConfigError: there is no policy, one is unknown, or one occurs twice.
    """
    policies = tuple(parse_policy(part) for part in text.split(",") if part.strip())
    if not policies:
        raise ConfigError(f"{name} must have at least one name, got {text!r}: leave it out for the default")
    seen: dict[ComparedPolicy, str] = {}
    for policy in policies:
        key = replace(policy, name="")
        if key in seen:
            raise ConfigError(f"policies {seen[key]!r} and {policy.name!r} are the same policy: leave one of them out")
        seen[key] = policy.name
    return policies
