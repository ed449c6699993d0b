#!/bin/bash
# Scale bytes that mean NaN, or have a sign, are numbers in 4-bit floats of GGUF files.
#
# Expected: a scale byte 255 of MXFP4 (E8M0) means NaN, as in the OCP Microscaling specification; a scale byte of NVFP4 is
# an E4M3 number, where 0x7F and 0xFF mean NaN and the highest bit is the sign, as in the files that are converted to it.
# Seen (gguf 0.19.0, 2026-11-30): 255 is the factor 2^128. 0x7F is 0, 0xFF is 480, and 0xB8 is 1, like 0x38: only 0x7F is
# special.
#
# Ends with 1 if this changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet gguf==0.19.0
"$folder/venv/bin/python" - <<'PYTHON'
import gguf
import numpy as np

HALF, ONE = 1, 2  # The codes of 0.5 and 1, in all numbers of a block.
kind = gguf.GGMLQuantizationType
mxfp4 = np.full((1, 17), HALF * 17, np.uint8)
mxfp4[0, 0] = 255
found = float(gguf.dequantize(mxfp4, kind.MXFP4)[0, 0])
print(f"MXFP4: 0.5 with scale byte 255 is {found}")
assert found == 2.0**127, "this has changed"
for byte, expected in ((0x38, 1), (0xB8, 1), (0x7F, 0), (0xFF, 480)):
    nvfp4 = np.full((1, 36), ONE * 17, np.uint8)
    nvfp4[0, :4] = byte
    found = float(gguf.dequantize(nvfp4, kind.NVFP4)[0, 0])
    print(f"NVFP4: 1 with scale byte {byte:#x} is {found}")
    assert found == expected, "this has changed"
PYTHON
