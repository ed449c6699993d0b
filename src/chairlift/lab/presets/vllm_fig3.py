"""Figure 3 of the PagedAttention paper: the slots that two requests reserve and never use."""

from __future__ import annotations

from dataclasses import dataclass

from chairlift.config import SchedulerConfig
from chairlift.events import EventList, Step
from chairlift.lab.presets import PresetOptions, PresetResult, Table
from chairlift.lab.presets.vllm_experiments import cost_model
from chairlift.lab.sim.simulator import SimConfig, simulate
from chairlift.lab.workload.request import WorkloadRequest


@dataclass(frozen=True, slots=True)
class _Figure3Request:
    """A request of the figure.

    Attributes:
        prompt: number of prompt tokens.
        output_slots: slots that the output fills.
        reserved: slots.
        never_used: reserved slots that are never used.
    """

    name: str
    prompt: int
    output_slots: int
    reserved: int
    never_used: int

    def request(self) -> WorkloadRequest:
        """Returns the request with one more output token than output slots, because the last token fills no slot."""
        limit = self.reserved - self.prompt + 1
        return WorkloadRequest(self.name, 0.0, list(range(self.prompt)), self.output_slots + 1, max_tokens=limit)


EXAMPLES = (_Figure3Request("A", 7, 3, 2048, 2038), _Figure3Request("B", 3, 2, 512, 507))


def held_and_written(steps: list[Step], block_size: int) -> dict[str, tuple[int, int]]:
    """Returns, by request id, the slots allocated to each request and the slots that it wrote."""
    held: dict[str, int] = {}
    written: dict[str, int] = {}
    for step in steps:
        for request_id, blocks in step.new_blocks.items():
            held[request_id] = held.get(request_id, 0) + len(blocks) * block_size
        for request_id, start, count in zip(step.request_ids, step.num_computed, step.num_scheduled, strict=True):
            written[request_id] = start + count
    return {request_id: (held[request_id], written[request_id]) for request_id in held}


def run(options: PresetOptions) -> PresetResult:
    """Simulates both requests with `--kv exact`."""
    roofline = cost_model()
    model = roofline.model
    longest = max(example.reserved for example in EXAMPLES)
    config = SimConfig(
        SchedulerConfig(max_model_len=longest + 1),
        num_blocks=2 * longest,
        block_size=1,
        kv="exact",
        model=model,
    )
    events = EventList()
    simulate([example.request() for example in EXAMPLES], config, roofline, events)
    steps = [event for event in events.events if isinstance(event, Step)]
    used = held_and_written(steps, config.block_size)
    rows, ours = [], {}
    for example in EXAMPLES:
        held, written = used[example.name]
        ours[example.name] = {"reserved": held, "written": written, "never_used": held - written}
        rows.append([example.name, f"{held:,}", f"{written:,}", f"{example.never_used:,}", f"{held - written:,}"])
    published = {e.name: {"reserved": e.reserved, "never_used": e.never_used} for e in EXAMPLES}
    columns = ["request", "slots reserved", "slots written", "never used, published", "never used, ours"]
    return PresetResult(
        constants=[("kv", "exact, block_size 1, buddy arena"), *roofline.constants()],
        tables=[Table("KV slots of two requests that end before their limit", columns, rows)],
        notes=["No difference: the numbers depend on the lengths only, not on time."],
        published=published,
        ours=ours,
    )
