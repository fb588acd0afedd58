"""The scripts import each other as files of one folder, which is on no path otherwise."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
