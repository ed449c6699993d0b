"""The stub of the extension module describes the compiled module."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest

from chairlift.kernels import cpu
from chairlift.kernels.cpu import load
from support.native import needs_native

pytestmark = needs_native

STUB = Path(cpu.__file__).with_name("_native.pyi")


class CleanDocstrings(ast.NodeTransformer):
    """Removes the indentation of docstrings, which the formatter changes."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            node.value.value = inspect.cleandoc(node.value.value)
        return node


def normalized(stub: str) -> list[str]:
    """The statements of a stub without their layout and order: one string for each class and function."""
    return sorted(ast.unparse(statement) for statement in CleanDocstrings().visit(ast.parse(stub)).body)


def generated_stub(module: Any) -> str:
    """What `make stub` writes, before formatting."""
    stubgen = pytest.importorskip("nanobind.stubgen")
    generator = stubgen.StubGen(module=module)
    generator.put(module)
    text: str = generator.get()
    return text


def test_the_stub_is_generated_from_the_compiled_module() -> None:
    """Names, parameters, defaults, array types and docstrings; after a change of the bindings: `make stub`."""
    assert normalized(STUB.read_text(encoding="utf-8")) == normalized(generated_stub(load()))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("num_ids: int", "count: int"),
        ("prologue: str = 'none'", "prologue: str = 'relu'"),
        ("masks: Annotated[NDArray[numpy.uint32]", "masks: Annotated[NDArray[numpy.int32]"),
        ("float32 [head_dim]", "float32 [head_dim / 2]"),
        ("    def start(self", "    def begin(self"),
    ],
)
def test_a_difference_in_a_stub_is_found(before: str, after: str) -> None:
    compiled = generated_stub(load())
    assert before in compiled
    assert normalized(compiled.replace(before, after)) != normalized(compiled)


def test_every_name_of_the_extension_has_a_docstring() -> None:
    tree = ast.parse(STUB.read_text(encoding="utf-8"))
    documented = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    bare = [node.name for node in documented if node.name != "__init__" and not ast.get_docstring(node)]
    assert len(documented) > 30
    assert bare == []
