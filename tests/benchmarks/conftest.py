"""The packages below benchmarks/ are imported as they are run: from the root of the repository."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))
