"""What the process imports, once, from which those of all ranks are forked."""

import importlib

import pytest
from _pytest.assertion import install_importhook

# A bare `assert a == b` tells its values on ranks too, as in pytest's own process; no public call does this.
install_importhook(pytest.Config.fromdictargs({}, []))
for name in ("rank_process", "torch._dynamo"):  # the latter with the first optimizer, otherwise
    importlib.import_module(name)
