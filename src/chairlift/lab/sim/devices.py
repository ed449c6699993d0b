"""The peak performance of devices, and the share of it that a step reaches."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

import msgspec

from chairlift.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Device:
    """The limits of one device, for the roofline cost model.

    The last six attributes are free constants. Their defaults were chosen before any simulation, are the same for
    every policy, and are printed with every result. Large fp16 matrix products reach somewhat more than the 52 % of the
    peak that whole training steps reach (Narayanan et al., SC'21, abstract), and plain copies reach 80 to 90 % of the
    bandwidth of a datasheet. A layer launches about ten kernels of a few microseconds each, and the host schedules a
    step in about a millisecond. A calibrated device has measured values.

    Attributes:
        peak_flops: dense floating point operations per second.
        bandwidth: the memory bandwidth in bytes per second.
        source: where the numbers come from.
        bytes_per_value: the size of the data type of `peak_flops`: 2 for half precision, 4 for single precision.
        link_bandwidth: bytes per second to the other devices, in one direction; 0: the device has no link.
        host_bandwidth: bytes per second to the memory of the host, in one direction; 0: it is the memory of the device.
        flops_efficiency, bandwidth_efficiency: the shares of the peaks that are reached.
        step_overhead: seconds per step.
        layer_overhead: seconds per layer of a step.
        all_reduce_latency: seconds before an exchange between devices starts.
        copy_latency: seconds before a copy between the device and the host starts.

    Raises:
        ConfigError: a number is not positive (for overheads: is negative), or an efficiency is above 1.
    """

    name: str
    peak_flops: float
    bandwidth: float
    memory_bytes: int
    source: str
    bytes_per_value: int = 2
    link_bandwidth: float = 0.0
    host_bandwidth: float = 0.0
    flops_efficiency: float = 0.6
    bandwidth_efficiency: float = 0.8
    step_overhead: float = 1e-3
    layer_overhead: float = 40e-6
    all_reduce_latency: float = 10e-6
    copy_latency: float = 5e-6

    def __post_init__(self) -> None:
        for name in ("peak_flops", "bandwidth", "memory_bytes", "flops_efficiency", "bandwidth_efficiency"):
            self._check(name, getattr(self, name) > 0, "positive")
        overheads = ("step_overhead", "layer_overhead", "all_reduce_latency", "copy_latency")
        for name in ("link_bandwidth", "host_bandwidth", *overheads):
            self._check(name, getattr(self, name) >= 0, "at least 0")
        for name in ("flops_efficiency", "bandwidth_efficiency"):
            self._check(name, getattr(self, name) <= 1, "at most 1, because it is a share of the peak")
        self._check("bytes_per_value", self.bytes_per_value in (1, 2, 4), "1, 2 or 4")

    def _check(self, name: str, is_valid: bool, requirement: str) -> None:
        value = getattr(self, name)
        if not is_valid or not math.isfinite(value):
            raise ConfigError(f"device {self.name}: {name} must be {requirement}, got {value}")


_GB: Final = 10**9
_TERA: Final = 1e12

_DEVICES: Final = (
    Device("A100-40GB", 312 * _TERA, 1555e9, 40 * _GB, "NVIDIA A100 datasheet, SXM4 40GB", 2, 300e9, 32e9),
    Device("A100-80GB", 312 * _TERA, 2039e9, 80 * _GB, "NVIDIA A100 datasheet, SXM4 80GB", 2, 300e9, 32e9),
    Device("H100-SXM", 989 * _TERA, 3350e9, 80 * _GB, "NVIDIA H100 datasheet, SXM5", 2, 450e9, 64e9),
    Device("H200", 989 * _TERA, 4800e9, 141 * _GB, "NVIDIA H200 datasheet, SXM", 2, 450e9, 64e9),
)
"""Dense fp16 tensor core peaks; link_bandwidth and host_bandwidth are half of the NVLink and PCIe bandwidths of the
datasheets (both directions)."""

DEVICES: Final = {device.name: device for device in _DEVICES}


def find_device(name: str) -> Device:
    """Returns a known device by name, or reads it from a JSON file that `chairlift simulate --calibrate` wrote.

    Raises:
        ConfigError: there is no such device or file, or a field of the file is missing, unknown or wrong.
    """
    if name in DEVICES:
        return DEVICES[name]
    path = Path(name).expanduser()
    if not path.is_file():
        raise ConfigError(f"device {name!r}: no such device or file; the devices are {', '.join(DEVICES)}")
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        device = msgspec.convert(record, Device)
    except OSError as error:
        raise ConfigError(
            f"device={path}: cannot be read: {error.strerror or error}; allow reading it, or choose another file"
        ) from None
    except ValueError as error:  # msgspec's errors are ValueErrors.
        raise ConfigError(f"device {path} is not a file of chairlift simulate --calibrate: {error}") from None
    names = [field.name for field in fields(Device)]
    if unknown := sorted(record.keys() - set(names)):
        raise ConfigError(f"device file {path}: unknown fields {', '.join(unknown)}; the fields are {', '.join(names)}")
    return device
