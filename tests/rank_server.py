"""What the process imports, once, from which those of all ranks are forked.

What is imported here is never looked at by the collections after each test; of a long session they took a third of the
time, most of it among the objects of these modules. They cost 3 s, so that a short one does without.
"""

import importlib
import os

if os.environ.get("TULLE_EMULATED_GUARD"):
    importlib.import_module("emulated_cuda")  # before torch

import pytest
from _pytest.assertion import install_importhook

# A bare `assert a == b` tells its values on ranks too, as in pytest's own process; no public call does this.
install_importhook(pytest.Config.fromdictargs({}, []))
NEEDED = ("rank_process", "torch._dynamo")  # the latter with the first optimizer, otherwise
OFTEN = (
    "torch._inductor.compile_fx",
    "torch.distributed.checkpoint",
    "tulle.named",
    "transformers.models.gpt2.modeling_gpt2",
)
IS_MANY = os.environ.get("TULLE_TESTS_MANY") and not os.environ.get("TULLE_TEST_DEVICE")  # some begin with CUDA
for name in (*NEEDED, *(OFTEN if IS_MANY else ())):
    importlib.import_module(name)
