"""Event logs for the tests of pages that show them."""

from __future__ import annotations

import json
from pathlib import Path

from chairlift.observability.event_log import encode_event
from support.tracked_engine import TrackedEngine

HOSTILE = '<img src=x onerror="window.wasExecuted=true"><script>window.wasExecuted=true</script>'


def recorded_log(tmp_path: Path, name: str = "r1") -> Path:
    engine = TrackedEngine(num_blocks=20, block_size=2, max_num_seqs=2)
    for number in range(5):
        engine.add([number, 3, 4], 6)
    engine.to_end()
    lines = "".join(f"{encode_event(event).decode()}\n" for event in engine.log.events)
    started = encode_event(engine.tracker.started).decode()  # type: ignore[arg-type]
    path = tmp_path / "run.jsonl"
    path.write_text(f"{started}\n{lines}".replace('"r1"', json.dumps(name)))
    return path
