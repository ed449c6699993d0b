"""Checks that each kernel source that is compiled for several instruction sets can be compiled alone."""

from __future__ import annotations

import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "src" / "chairlift" / "kernels" / "cpu" / "csrc"
LEVELS = (
    "avx2",
    "fma",
    "f16c",
    "bmi",
    "bmi2",
    "avx512f",
    "avx512bw",
    "avx512dq",
    "avx512vl",
    "avx512vnni",
    "avx512bf16",
)
OPTIONS = ["-std=c++17", "-DCHAIRLIFT_X86", *(f"-m{level}" for level in LEVELS)]
SOURCE = """
#define CHAIRLIFT_ISA avx512_bf16
#define CHAIRLIFT_ISA_NAME "avx512-bf16"
#define CHAIRLIFT_BASE avx512_vnni::table()
#define CHAIRLIFT_VNNI
#define CHAIRLIFT_BF16
#define CHAIRLIFT_SIMD "simd/avx512.h"
#include "{}"
"""


def compile_intrinsics(folder: Path) -> None:
    """Compile the header of all intrinsics, which each source needs, once, because it takes nine tenths of the time."""
    (folder / "intrinsics.h").write_text("#include <immintrin.h>\n")
    subprocess.run(["g++", *OPTIONS, "-x", "c++-header", "intrinsics.h"], cwd=folder, check=True)


def compile_alone(source: Path, folder: Path) -> str:
    """The first errors of the compiler; empty if there are none."""
    text = SOURCE.format(source.relative_to(CSRC).as_posix())
    command = [
        "g++",
        *OPTIONS,
        "-fsyntax-only",
        f"-I{CSRC}",
        "-include",
        str(folder / "intrinsics.h"),
        "-x",
        "c++",
        "-",
    ]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stderr[:2000]


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the instruction set is one of x86")
def test_sources_do_not_depend_on_the_order_of_includes(tmp_path: Path) -> None:
    sources = sorted(CSRC.rglob("*.inl"))
    assert len(sources) > 15
    compile_intrinsics(tmp_path)
    with ThreadPoolExecutor(2) as threads:
        errors = dict(zip(sources, threads.map(partial(compile_alone, folder=tmp_path), sources), strict=True))
    assert {source.name: error for source, error in errors.items() if error} == {}
