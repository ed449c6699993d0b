"""The matrix products of a step, with what their kernels fuse, from the declaration of a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from chairlift.models.declaration.layer_spec import LayerSpec
from chairlift.models.declaration.matrix_spec import MatrixSpec, NormSpec
from chairlift.models.declaration.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product of a step, with the operations that its kernel fuses.

    Attributes:
        prologue: the function of a row before the product: "none", the kind of a norm, or an activation kernel.
        adds_residual: whether the kernel adds the product to the residual stream.
    """

    matrix: MatrixSpec
    prologue: str
    adds_residual: bool = False


def layer_products(layer: LayerSpec) -> tuple[Product, ...]:
    """The products of a layer that every token needs, in the order of a step; those of experts are not included."""
    return *_mixer_products(layer), *_network_products(layer)


def head_product(config: ModelConfig) -> Product:
    """The product that computes the logits."""
    return Product(config.head_matrix, _prologue(None if config.project_out is not None else config.final_norm))


def _mixer_products(layer: LayerSpec) -> Iterator[Product]:
    """The products of the recurrence and of attention."""
    if (recurrence := layer.recurrence) is not None:
        yield Product(recurrence.input, _prologue(layer.recurrence_norms.before))
        yield from (Product(gate, "none") for gate in recurrence.gates)
        yield Product(recurrence.output, "none", layer.recurrence_adds_residual)
    if (attention := layer.attention) is not None:
        before = _prologue(layer.attention_norms.before)
        plain = () if attention.latent is None else (attention.latent.keys.kernel, attention.latent.values.kernel)
        for matrix in attention.matrices[:-1]:
            yield Product(matrix, "none" if matrix.kernel in plain else before)
        yield Product(attention.output, "none", layer.attention_adds_residual)


def _network_products(layer: LayerSpec) -> Iterator[Product]:
    """The products of a dense network, of the router, of the gate beside a dense network, and of the third branch."""
    before = _prologue(layer.feed_forward_norms.before)
    if (mlp := layer.feed_forward) is not None and mlp.router is None:
        yield Product(mlp.up, before)
        yield Product(mlp.down, mlp.activation_kernel, layer.feed_forward_adds_residual)
    if layer.parallel_experts is not None:
        before = _prologue(layer.parallel_experts.before)
    if layer.mixture is not None and (router := layer.mixture.router) is not None:
        yield Product(router.matrix, before if router.norm is None else router.norm.kind)
    if layer.parallel_experts is not None and layer.parallel_experts.gate is not None:
        yield Product(layer.parallel_experts.gate, before)
    if (branch := layer.per_layer_branch) is not None:
        yield Product(branch.gate, "none")
        yield Product(branch.projection, branch.activation_kernel)


def _prologue(norm: NormSpec | None) -> str:
    return "none" if norm is None else norm.kind
