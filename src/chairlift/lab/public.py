"""The names of `chairlift.lab`: policies of one's own, workloads, and the simulator."""

from __future__ import annotations

from chairlift.config import SchedulerConfig as SchedulerConfig
from chairlift.core.baselines.reservations import ReservationKVCacheManager as ReservationKVCacheManager
from chairlift.core.factory import KVPool as KVPool
from chairlift.core.kv.kv_cache_manager import KVCacheManager as KVCacheManager
from chairlift.core.kv.kv_cache_manager import MemoryDemand as MemoryDemand
from chairlift.core.kv.paged_kv_cache import PagedKVCacheManager as PagedKVCacheManager
from chairlift.core.queues.request_queue import Key as Key
from chairlift.core.queues.request_queue import RequestQueue as RequestQueue
from chairlift.lab.metrics.run import RunMetrics as RunMetrics
from chairlift.lab.metrics.run import RunTally as RunTally
from chairlift.lab.sim.devices import DEVICES as DEVICES
from chairlift.lab.sim.model_shape import model_shape as model_shape
from chairlift.lab.sim.roofline import Roofline as Roofline
from chairlift.lab.sim.simulator import SimConfig as SimConfig
from chairlift.lab.sim.simulator import simulate as simulate
from chairlift.lab.workload.arrivals import ArrivalProcess as ArrivalProcess
from chairlift.lab.workload.lengths import parse_lengths as parse_lengths
from chairlift.lab.workload.request import WorkloadRequest as WorkloadRequest
from chairlift.lab.workload.synthetic import make_workload as make_workload
from chairlift.lab.workload.traces import read_trace as read_trace
from chairlift.request import Request as Request

__all__ = sorted(name for name in globals() if name[0] != "_" and name != "annotations")
