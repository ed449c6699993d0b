"""Programs that look for faults for minutes or hours, which `make` runs: fuzzing, costs of requests, and soak tests."""

import sys
from pathlib import Path

# They use the modules that support the tests.
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
