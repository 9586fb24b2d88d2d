"""`eager`: marks functions that no compiler is to trace, as they exchange with other ranks."""

from __future__ import annotations

from torch._compile import _disable_dynamo as eager  # as torch.optim does: torch.compiler.disable imports the compiler

__all__ = ["eager"]
