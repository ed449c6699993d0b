"""The status line, the memory bar and the request rows of a snapshot."""

from __future__ import annotations

from typing import Any, Final

from rich.text import Text

KINDS: Final = {
    "token_states": ("█", "green"),
    "reserved": ("▓", "yellow"),
    "internal": ("▒", "red"),
    "external": ("░", "magenta"),
    "free": ("·", "bright_black"),
}
"""Kind of KV slots -> character and colour."""

COLUMNS: Final = (
    "request",
    "state",
    "waits for",
    "prompt",
    "cached",
    "output",
    "blocks",
    "preempted",
    "queue s",
    "age s",
)


def status_line(engine: dict[str, Any], steps_per_s: float | None) -> str:
    """One line with the state of the engine and its batch."""
    configuration, status, batch = engine["configuration"], engine["status"], engine["batch"]
    restarts = f", {status['restarts']} restarts" if status["restarts"] else ""
    parts = [
        f"{configuration.get('model', '?')}: {status['state']}{restarts}",
        f"{configuration.get('batching', '?')}/{configuration.get('kv', '?')}",
    ]
    if batch is not None and _is_idle(engine):
        parts.append(f"idle after step {batch['step']}")
    elif batch is not None:
        parts.append(f"{batch['num_running']} running, {batch['num_waiting']} waiting")
        parts.append(f"step {batch['step']} of {batch['num_tokens']} tokens")
        if batch["wait_reason"] is not None:
            parts.append(f"{batch['head']} waits for {batch['wait_reason']}")
    if steps_per_s is not None:
        parts.append(f"{steps_per_s:.1f} steps/s")
    return "   ".join(parts)


def _is_idle(engine: dict[str, Any]) -> bool:
    """Whether the engine has no unfinished requests, so that pool and batch are empty since the last step."""
    return bool(engine["status"]["num_unfinished"] == 0)


def memory_bar(engine: dict[str, Any], width: int) -> Text:
    """The slots of the pool by kind, as a bar of `width` characters and a legend."""
    pool = engine["pool"]
    if pool is None:
        return Text("no step yet")
    slots: dict[str, int] = pool["slots"]
    total = sum(slots.values())
    if _is_idle(engine):
        slots = {**dict.fromkeys(KINDS, 0), "free": total}
    text = Text()
    for kind, count in shares(slots, width).items():
        sign, colour = KINDS[kind]
        text.append(sign * count, colour)
    text.append("\n")
    for kind, (sign, colour) in KINDS.items():
        text.append(f"{sign} ", colour)
        text.append(f"{kind} {slots[kind]} ({slots[kind] / total:.0%})  ")
    return text


def shares(slots: dict[str, int], width: int) -> dict[str, int]:
    """The number of characters for each kind, `width` in total, by the method of largest remainders."""
    total = sum(slots.values())
    exact = {kind: slots[kind] * width / total for kind in KINDS}
    found = {kind: int(value) for kind, value in exact.items()}
    by_remainder = sorted(KINDS, key=lambda kind: found[kind] - exact[kind])
    for kind in by_remainder[: width - sum(found.values())]:
        found[kind] += 1
    return found


def request_row(request: dict[str, Any]) -> tuple[str, ...]:
    """The cells of COLUMNS for a request."""
    times = request["timings"]
    queue_time = times["queue_time"]
    return (
        request["id"],
        request["state"],
        request["wait_reason"] or "",
        str(request["num_prompt_tokens"]),
        str(request["num_cached_tokens"]),
        f"{request['num_output_tokens']}/{request['max_tokens']}",
        str(request["num_blocks"]),
        str(request["num_preemptions"]),
        "" if queue_time is None else f"{queue_time:.2f}",
        f"{times['age']:.1f}",
    )
