"""The kernels of the set "triton"; torch multiplies matrices in the type of activations, and finds top logprobs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from chairlift.kernels.interface import Kernels, Prologue
from chairlift.kernels.lora import LoraLayer
from chairlift.kernels.torch_kernels import TORCH
from chairlift.kernels.triton.adapters import AdapterMaker, TritonAdaptedLinear
from chairlift.kernels.triton.attention import TritonAttention
from chairlift.kernels.triton.experts import make_mixture
from chairlift.kernels.triton.matrices import DeviceMatrixLoader
from chairlift.kernels.triton.products import TritonLinear, make_embedding, make_linear
from chairlift.kernels.triton.recurrence import TritonRecurrence
from chairlift.kernels.triton.rows import gate, make_prologue, make_residual_sum


def triton_kernels() -> Kernels:
    """The kernels for one model."""
    loader, adapters = DeviceMatrixLoader(), AdapterMaker()
    make_set_linear = partial(make_linear, make_prologue=make_prologue)

    def add_lora(base: TritonLinear, prologue: Prologue, layer: LoraLayer) -> TritonAdaptedLinear:
        return adapters.add_lora(base, layer)

    return replace(
        TORCH,
        name="triton",
        load_matrix=loader.load,
        load_router=loader.load,
        make_embedding=make_embedding,
        make_linear=make_set_linear,
        add_lora=add_lora,
        make_residual_sum=make_residual_sum,
        make_mixture=partial(make_mixture, make_set_linear=make_set_linear, make_prologue=make_prologue),
        make_recurrence=TritonRecurrence,
        gate=gate,
        attention=TritonAttention,
        notes=loader.notes,
    )
