#!/bin/bash
# An array whose columns lie together in memory is saved with its values in another order.
#
# Expected: safetensors.numpy.save writes the values of any array, as numpy.save does, or raises an error as
# safetensors.torch.save does for tensors that are not contiguous.
# Seen (safetensors 0.8.0 with numpy 2.4.6, 2026-11-30): the bytes are written as they lie in memory, below the shape of the
# array. [[0, 1, 2], [3, 4, 5]] in Fortran's order is read back as [[0, 3, 1], [4, 2, 5]], without an error or a warning.
#
# Ends with 1 if this changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet safetensors==0.8.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import numpy
from safetensors.numpy import load, save

rows = numpy.arange(6, dtype=numpy.float32).reshape(2, 3)
columns = numpy.asfortranarray(rows)
assert numpy.array_equal(rows, columns)
for name, array in (("C's order", rows), ("Fortran's order", columns)):
    print(f"{name}: {array.tolist()} is read back as {load(save({'x': array}))['x'].tolist()}")
assert numpy.array_equal(load(save({"x": rows}))["x"], rows), "this has changed"
assert load(save({"x": columns}))["x"].tolist() == [[0, 3, 1], [4, 2, 5]], "this has changed"
PYTHON
