"""Compiles every variant of the Triton kernels for GPUs, without a GPU, and checks what would fail or be slow there.

    python -m benchmarks.gpu_compile [--arch sm_90 ...] [--variant NAME ...] [--all] [--processes N] [--json FILE]

It prints the largest values of each kernel, and with --all those of each variant. The variants are those of
`variants()` in each module of `chairlift.kernels.triton`, compiled as `Launch` would compile them at its first call.
The code has no line numbers, so that its hash is equal on every machine. The command ends with 1 if a variant does not
compile, has spills or a stack, needs more memory than an architecture has, has no matrix instruction for a product, or
is only a trap; it names each of them.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import multiprocessing
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import triton
from benchmarks.common import print_result
from rich.table import Table
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from chairlift.counts import counted
from chairlift.engine.progress import progress_bar
from chairlift.errors import ConfigError
from chairlift.kernels import triton as kernel_modules
from chairlift.kernels.triton.launch import ALIGNMENT, INTERPRETED, Launch

TENSOR_COLUMNS: Final = 512
"""Columns of the tensor memory of a multiprocessor of sm_100 (PTX ISA, section "Tensor Memory")."""

MATRIX_INSTRUCTION: Final = re.compile(r"\b(mma\.sync|wgmma\.mma_async|tcgen05\.mma|v_mfma)[\w.:]*")
WIDE_LOAD: Final = re.compile(
    r"\bld\.global[\w.:]*\.v(?:4\.[bfu]32|2\.[bfu]64|8\.[bfu]32)"
    r"|\bcp\.async\.c[ag]\.shared\.global\b[^;]*, (?:0x10|16)\b"
    r"|\b(?:global|buffer)_load_(?:lds_)?dwordx4\b"
)
"""A load of 16 bytes or more by each thread."""

HEADINGS: Final = ("kernel", "architecture", "registers", "stack", "shared", "matrix instruction", "wide loads")

RESOURCES: Final = re.compile(r"\b(REG|STACK):(\d+)")
AMD_RESOURCES: Final = re.compile(r"^\s+(?:- )?\.(\w+): +(\d+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Architecture:
    """An architecture that variants are compiled for.

    Attributes:
        target: Triton's backend, architecture and threads in a warp.
        shared_bytes: maximum shared memory of a thread block: the CUDA C++ Programming Guide, table "Technical
            Specifications per Compute Capability" (163, 99 and 227 KiB); the LDS of a workgroup in AMD's CDNA 3 ISA.
    """

    target: tuple[str, int | str, int]
    shared_bytes: int


ARCHITECTURES: Final = {
    "sm_80": Architecture(("cuda", 80, 32), 163 << 10),
    "sm_86": Architecture(("cuda", 86, 32), 99 << 10),
    "sm_89": Architecture(("cuda", 89, 32), 99 << 10),
    "sm_90": Architecture(("cuda", 90, 32), 227 << 10),
    "sm_100": Architecture(("cuda", 100, 32), 227 << 10),
    "sm_120": Architecture(("cuda", 120, 32), 99 << 10),
    "gfx942": Architecture(("hip", "gfx942", 64), 64 << 10),
}


@dataclass(frozen=True, slots=True)
class CompiledFacts:
    """What the compiler made of a variant.

    Attributes:
        registers: vector registers of a thread.
        stack: bytes of local memory of a thread, which spills need.
        spills: spilled vector registers. NVIDIA's assembler reports them in the stack only.
        shared: bytes of shared memory of a thread block.
        tensor_columns: columns of tensor memory.
        matrix_instruction: the first instruction of the matrix units; None if there is none.
        wide_loads: loads of 16 bytes or more by each thread in the code.
        is_trap: whether the code is only a trap.
        sha256: hash of the code object.
    """

    registers: int
    stack: int
    spills: int
    shared: int
    tensor_columns: int
    matrix_instruction: str | None
    wide_loads: int
    is_trap: bool
    sha256: str

    def problems(self, arch: str, has_product: bool) -> Iterator[str]:
        """What would fail or be slow on the architecture, as phrases."""
        if self.is_trap:
            yield "the code is only a trap"
        if self.stack or self.spills:
            yield f"{self.stack:,} bytes of stack and {self.spills:,} spilled registers"
        if self.shared > (limit := ARCHITECTURES[arch].shared_bytes):
            yield f"{self.shared:,} bytes of shared memory, of at most {limit:,}"
        if self.tensor_columns > TENSOR_COLUMNS:
            yield f"{self.tensor_columns:,} columns of tensor memory, of at most {TENSOR_COLUMNS}"
        if has_product and self.matrix_instruction is None:
            yield "a product without matrix instructions"


@dataclass(frozen=True, slots=True)
class Variant:
    """A variant for an architecture: the place of its `Launch`, and what was found.

    Attributes:
        kernel: the name of the function.
        facts: None if it does not compile.
        problems: see `CompiledFacts.problems`; the message of the compiler if it does not compile.
    """

    module: str
    kernel: str
    name: str
    arch: str
    facts: CompiledFacts | None = None
    problems: tuple[str, ...] = ()

    def compiled(self) -> Variant:
        """The variant with what the compiler makes of it."""
        launch = dict(importlib.import_module(self.module).variants())[self.name]
        try:
            facts = compile_variant(launch, self.arch)
        except Exception as error:  # Triton raises many kinds, and every one of them is a finding.
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            return replace(self, problems=(f"{type(error).__name__}: {' '.join(lines[-3:])}",))
        return replace(self, facts=facts, problems=tuple(facts.problems(self.arch, launch.has_product)))

    def cells(self) -> tuple[str, ...]:
        """The row of the table."""
        if (facts := self.facts) is None:
            return (self.name, self.arch, "does not compile", *[""] * 5)
        return (
            self.name,
            self.arch,
            str(facts.registers),
            str(facts.stack),
            f"{facts.shared:,}",
            facts.matrix_instruction or "-",
            str(facts.wide_loads),
            facts.sha256[:12],
        )


def compile_variant(launch: Launch, arch: str) -> CompiledFacts:
    """Compile a kernel as its `Launch` does on a device of the architecture, one of ARCHITECTURES.

    Raises:
        ConfigError: the interpreter has replaced the compiler, or Triton would compile the kernel again for other
            values of an argument.
    """
    if INTERPRETED:
        raise ConfigError("TRITON_INTERPRET=1: the interpreter replaces the compiler; unset it")
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages, "enable_fp_fusion": True}
    compiled = triton.compile(_source(launch), target=GPUTarget(*ARCHITECTURES[arch].target), options=options)
    is_amd = "hsaco" in compiled.asm
    text, binary = (compiled.asm[name] for name in (("amdgcn", "hsaco") if is_amd else ("ptx", "cubin")))
    registers, stack, spills = _amd_resources(text) if is_amd else _nvidia_resources(binary)
    found = MATRIX_INSTRUCTION.search(text)
    return CompiledFacts(
        registers=registers,
        stack=stack,
        spills=spills,
        shared=compiled.metadata.shared,
        tensor_columns=getattr(compiled.metadata, "tmem_size", None) or 0,
        matrix_instruction=None if found is None else found[0],
        wide_loads=len(WIDE_LOAD.findall(text)),
        is_trap="s_trap" in text if is_amd else "ret;" not in text,
        sha256=hashlib.sha256(binary).hexdigest(),
    )


def _source(launch: Launch) -> ASTSource:
    """The kernel with the types and hints that the arguments of a launch have."""
    kernel, types = launch.kernel, iter(launch.types)
    signature, constants, hints = {}, {}, {}
    for index, param in enumerate(kernel.params):
        if param.is_constexpr or param.name in launch.constants:
            signature[param.name] = "constexpr"
            constants[(index,)] = launch.constants.get(param.name, param.default)
            continue
        signature[param.name] = kind = next(types)
        if kind.startswith("*"):
            hints[(index,)] = [["tt.divisibility", ALIGNMENT]]
        elif kind[0] in "iu" and not param.do_not_specialize:
            raise ConfigError(f"{param.name} is not in do_not_specialize, so the code depends on its value")
    if unused := list(types):
        raise ConfigError(f"types={launch.types}: {', '.join(unused)} belong to no parameter")
    return ASTSource(kernel, signature, constants, hints)


def _nvidia_resources(binary: bytes) -> tuple[int, int, int]:
    """The registers, bytes of stack and spilled registers, which NVIDIA's assembler reports as a stack only."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        report = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = {name: int(value) for name, value in RESOURCES.findall(report)}
    return found["REG"], found["STACK"], 0


def _amd_resources(text: str) -> tuple[int, int, int]:
    """The registers, bytes of stack and spilled registers. Scalar registers are spilled to vector registers."""
    found = {name: int(value) for name, value in AMD_RESOURCES.findall(text)}
    return found["vgpr_count"], found["private_segment_fixed_size"], found["vgpr_spill_count"]


def find_variants(archs: Sequence[str], names: Sequence[str] = ()) -> list[Variant]:
    """Every variant for each of the architectures.

    Args:
        names: parts of the names of variants; all variants if there is none.

    Raises:
        ConfigError: two variants of a module have the same name.
    """
    found = []
    for info in pkgutil.walk_packages(kernel_modules.__path__, f"{kernel_modules.__name__}."):
        module: Any = importlib.import_module(info.name)
        launches = list(module.variants()) if hasattr(module, "variants") else []
        counts = Counter(name for name, _ in launches)
        if repeated := [name for name, count in counts.items() if count > 1]:
            raise ConfigError(f"{info.name}: several variants have the name {', '.join(repeated)}")
        for name, launch in launches:
            if not names or any(part in name for part in names):
                found += [Variant(info.name, launch.kernel.__name__, name, arch) for arch in archs]
    return found


def variants_table(variants: Sequence[Variant]) -> Table:
    """A row for each variant."""
    table = Table(*HEADINGS, "sha256")
    for variant in variants:
        table.add_row(*variant.cells())
    return table


def kernels_table(variants: Sequence[Variant]) -> Table:
    """The largest values of the variants of each kernel on each architecture, and the least number of wide loads."""
    grouped: dict[tuple[str, str], list[CompiledFacts]] = {}
    for variant in variants:
        if variant.facts is not None:
            grouped.setdefault((variant.kernel, variant.arch), []).append(variant.facts)
    table = Table(*HEADINGS, "variants")
    for (kernel, arch), facts in grouped.items():
        largest = (f"{max(getattr(each, name) for each in facts):,}" for name in ("registers", "stack", "shared"))
        found = (MATRIX_INSTRUCTION.match(each.matrix_instruction or "") for each in facts)
        families = ", ".join(sorted({match[1] for match in found if match is not None}))
        least = min(each.wide_loads for each in facts)
        table.add_row(kernel, arch, *largest, families or "-", str(least), str(len(facts)))
    return table


def digest(variants: Sequence[Variant]) -> str:
    """A hash of the code of all variants."""
    hashes = "".join("" if variant.facts is None else variant.facts.sha256 for variant in variants)
    return hashlib.sha256(hashes.encode()).hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="+", choices=ARCHITECTURES, default=list(ARCHITECTURES))
    parser.add_argument("--variant", nargs="+", default=[], help="parts of the names of variants")
    parser.add_argument("--all", action="store_true", help="print each variant")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="processes that compile")
    parser.add_argument("--json", type=Path, help="file for the facts of all variants")
    args = parser.parse_args()
    variants = find_variants(args.arch, args.variant)
    if not variants:
        parser.error(f"no module of {kernel_modules.__name__} has a variant with such a name")
    compiled: list[Variant] = []
    pool = ProcessPoolExecutor(args.processes, multiprocessing.get_context("spawn"))
    with pool, progress_bar("compiled variants", len(variants)) as advance:
        for variant in pool.map(Variant.compiled, variants):
            compiled.append(variant)
            advance()
    table = variants_table(compiled) if args.all else kernels_table(compiled)
    print_result("gpu_compile", {"triton": triton.__version__}, None, [table], as_json=False, width=150)
    if args.json is not None:
        record = {"triton": triton.__version__, "variants": [asdict(variant) for variant in compiled]}
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for arch in args.arch:
        print(f"{arch}: code of all variants has the sha256 {digest([each for each in compiled if each.arch == arch])}")
    problems = [f"{each.name} on {each.arch}: {problem}" for each in compiled for problem in each.problems]
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    print(f"{counted(len(compiled), 'variant')}, {counted(len(problems), 'problem')}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
