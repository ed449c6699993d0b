"""Check the native kernels of an installed Chairlift: their types, one product against that of torch, and the default
model."""

from __future__ import annotations

from pathlib import Path

import torch

import chairlift
from chairlift.kernels.cpu import load


def check_stub() -> None:
    folder = Path(chairlift.__file__).parent / "kernels" / "cpu"
    (library,) = folder.glob("_native*.so")
    assert (folder / "_native.pyi").is_file(), f"{library} is installed without its types, _native.pyi"


def try_product() -> None:
    native = load()
    print(f"{chairlift.__file__}: native kernels on {native.isa()}, of {', '.join(native.available_isas())}")
    matrix = native.PackedMatrix("q4_1", 96, 160)
    matrix.pack_floats(0, torch.randn(96, 160).numpy())
    # Multiples of 1/64 up to 127/64 in each group of 32 inputs, which the kernel rounds to 8 bits without an error.
    x, out = torch.randint(-127, 128, (5, 160)) / 64, torch.empty(5, 96)
    x[:, ::32] = 127 / 64
    native.FusedLinear([matrix])(x.data_ptr(), 160, 5, out.data_ptr(), 96, False)
    expected = x @ torch.from_numpy(matrix.unpack(0, 96)).t()
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-4)
    print(f"products: largest difference from torch {(out - expected).abs().max():.1e}")


def try_model() -> None:
    question = "What is the capital of France?"
    llm = chairlift.LLM(num_kv_blocks=16)
    (answer,) = llm.chat(
        [[{"role": "user", "content": question}]], chairlift.SamplingParams(temperature=0.0, max_tokens=16)
    )
    llm.close()
    print(f"{question} {answer.outputs[0].text}")
    assert "Paris" in answer.outputs[0].text


if __name__ == "__main__":
    check_stub()
    try_product()
    try_model()
