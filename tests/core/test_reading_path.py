"""The files from which continuous batching over paged memory is learned, and what keeps them readable."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from chairlift.config import SCHEDULING_POLICIES, SchedulerConfig
from chairlift.core.continuous_batching import ContinuousBatching
from chairlift.core.factory import KVPool, make_kv_cache_manager, make_scheduler
from chairlift.core.kv.observed_prefixes import ObservedPrefixes
from chairlift.core.kv.paged_kv_cache import PagedKVCacheManager
from chairlift.core.kv.prefix_cache import PrefixCache
from chairlift.core.kv.state_checkpoints import CheckpointPlan
from chairlift.core.kv.stored_prefixes import BlockStore
from chairlift.core.measuring.scheduler_meter import SchedulerMeter
from chairlift.core.measuring.scheduler_observer import SchedulerObserver
from chairlift.core.scheduler import Scheduler
from chairlift.speculative_config import SpeculativeConfig
from support.fakes import make_request

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "chairlift"
MAX_LINES = 1100


def reading_path() -> list[str]:
    """The files that the section of docs/architecture.md names, relative to the package."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = text.split("## The reading path\n")[1].split("\n## ")[0]
    return re.findall(r"^\d\. `([\w/]+\.py)`", section, re.MULTILINE)


def writers(attribute: str) -> Iterator[str]:
    """The modules that assign this attribute of any object."""
    for path in SOURCE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if attribute in text else ():
            if isinstance(node, ast.Attribute) and node.attr == attribute and isinstance(node.ctx, ast.Store):
                yield path.relative_to(SOURCE).as_posix()


def test_six_files_have_at_most_1100_lines() -> None:
    files = reading_path()
    assert len(files) == 6
    lines = {name: len((SOURCE / name).read_text(encoding="utf-8").splitlines()) for name in files}
    assert sum(lines.values()) <= MAX_LINES, lines


CONFIG = SchedulerConfig(max_model_len=64, max_num_seqs=8, max_num_batched_tokens=32)
PLAIN = KVPool(64, 16, 1024)


@pytest.mark.parametrize(
    ("config", "pool", "is_stored"),
    [
        (CONFIG, PLAIN, False),
        (CONFIG, replace(PLAIN, windows=(None, 8)), False),
        (CONFIG, replace(PLAIN, checkpoints=CheckpointPlan(4, 16)), False),
        (CONFIG, replace(PLAIN, num_swap_blocks=4), False),
        (CONFIG, PLAIN, True),
        (replace(CONFIG, speculative_config=SpeculativeConfig(num_speculative_tokens=5)), PLAIN, False),
        *(
            (replace(CONFIG, scheduling_policy=policy, length_predictor="max_tokens"), PLAIN, False)
            for policy in SCHEDULING_POLICIES
        ),
    ],
    ids=["plain", "windows", "hybrid", "swapping", "disk", "drafts", *SCHEDULING_POLICIES],
)
def test_the_scheduler_that_is_read_is_what_runs(config: SchedulerConfig, pool: KVPool, is_stored: bool) -> None:
    manager = make_kv_cache_manager(pool, True, [Mock(spec=BlockStore)] if is_stored else ())
    scheduler = make_scheduler(config, manager)
    assert type(manager) is PagedKVCacheManager
    for part, expected in ((scheduler, Scheduler), (scheduler._batch, ContinuousBatching)):
        assert type(part) is expected
        assert source_of(expected) in reading_path()
        overridden = vars(part).keys() & {name for name, value in vars(expected).items() if callable(value)}
        assert not overridden, "no method is replaced in an instance"
    scheduler.add(make_request("plain", [1, 2, 3]))
    assert scheduler.unfinished["plain"].group is None
    assert not scheduler._batch.groups


def test_classes_of_the_reading_path_have_no_other_subclasses_than_baselines_and_pooling() -> None:
    def subclasses(part: type) -> set[str]:
        return {each.__name__ for each in part.__subclasses__() if each.__module__.startswith("chairlift.")}

    assert subclasses(Scheduler) == {"StaticScheduler", "PoolingScheduler"}
    assert not subclasses(ContinuousBatching)
    assert not subclasses(PagedKVCacheManager)


@pytest.mark.parametrize(
    "fields",
    [{}, {"windows": (None, 8)}, {"checkpoints": CheckpointPlan(4, 16)}, {"num_swap_blocks": 4}],
    ids=lambda fields: next(iter(fields), "plain"),
)
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_the_kv_memory_that_is_read_is_what_runs(fields: dict[str, Any], enable_prefix_caching: bool) -> None:
    manager = make_kv_cache_manager(KVPool(64, 16, 1024, **fields), enable_prefix_caching)
    assert type(manager) is PagedKVCacheManager
    assert source_of(PagedKVCacheManager) in reading_path()
    if enable_prefix_caching and not fields:
        assert type(manager.prefixes) is ObservedPrefixes, "a PrefixCache that notifies the eviction order"
        assert source_of(PrefixCache) in reading_path()


def source_of(part: type) -> str:
    return Path(inspect.getfile(part)).relative_to(SOURCE).as_posix()


def test_the_observer_of_the_scheduler_has_at_most_ten_hooks() -> None:
    hooks = {name for name in vars(SchedulerObserver) if not name.startswith("_")}
    assert len(hooks) <= 10
    assert {name for name in vars(SchedulerMeter) if not name.startswith("_")} == hooks


def test_only_batches_write_the_progress_of_a_request() -> None:
    rows_of_the_device = {"worker/request_rows.py", "worker/draft_model.py"}
    batches = {"core/continuous_batching.py", "core/beam_group.py"}
    assert set(writers("num_computed_tokens")) == batches | rows_of_the_device
