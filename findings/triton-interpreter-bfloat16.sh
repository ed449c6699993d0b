#!/bin/bash
# Triton's interpreter adds and multiplies the bit patterns of bfloat16 numbers.
#
# Expected: a kernel gives the same numbers in bfloat16 as in float16 and float32 where all three represent them exactly,
# also with TRITON_INTERPRET=1.
# Seen (triton 3.9.0 with torch 2.13.0, 2026-11-30): a tensor of bfloat16 is held as unsigned integers of 16 bits, and
# sums, products of matrices and signs are those of the integers. 1 + 1 is 1.7e38, and the dot product of sixteen ones 4.2e9.
# float16 and both formats of float8 are right.
#
# Ends with 1 if this changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile triton==3.9.0 torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import importlib.util
import os
import tempfile

os.environ["TRITON_INTERPRET"] = "1"
KERNELS = """
import triton
import triton.language as tl


@triton.jit
def add(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y + i, tl.load(x + i) + tl.load(x + i))


@triton.jit
def dot(x, y, N: tl.constexpr):
    i = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(y + i, tl.dot(tl.load(x + i), tl.load(x + i)))
"""
with tempfile.NamedTemporaryFile("w", suffix=".py") as file:  # Triton reads the source of a kernel from its file.
    file.write(KERNELS)
    file.flush()
    spec = importlib.util.spec_from_file_location("kernels", file.name)
    kernels = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kernels)
    import torch

    for name in ("float32", "float16", "float8_e4m3fn", "float8_e5m2", "bfloat16"):
        dtype = getattr(torch, name)
        ones, products = torch.ones(16, 16).to(dtype), torch.zeros(16, 16)
        kernels.dot[(1,)](ones, products, N=16)
        line = f"{name}: the dot product of sixteen ones is {products[0, 0].item()}"
        assert (products[0, 0] == 16) == (name != "bfloat16"), "this has changed"
        if not name.startswith("float8"):
            sums = torch.zeros(16, dtype=dtype)
            kernels.add[(1,)](ones[0].contiguous(), sums, N=16)
            line += f", 1 + 1 is {sums[0].item()}"
            assert (sums[0] == 2) == (name != "bfloat16"), "this has changed"
        print(line)
PYTHON
