"""Files of `benchmarks` as modules, for tests: no package holds them, and several have one name."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def load(benchmark: str, name: str = "__main__") -> ModuleType:
    """A file of a benchmark; the folder must be on the path if it imports its neighbours."""
    called = f"{benchmark.replace('-', '_')}_{name}"
    spec = importlib.util.spec_from_file_location(called, BENCHMARKS / benchmark / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
