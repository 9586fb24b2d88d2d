"""Gradients of replicated parameters: one file a scheme, the choice among them, and the sum of a step's tables."""

from tulle.sync.all_reduce import all_reduce
from tulle.sync.reduce import ABSENT, DENSE, Gradient, announce, sum_gradients
from tulle.sync.schemes import AUTO, SCHEMES, Choice, check_scheme, choose
from tulle.sync.table import Table

__all__ = [
    "ABSENT",
    "AUTO",
    "DENSE",
    "SCHEMES",
    "Choice",
    "Gradient",
    "Table",
    "all_reduce",
    "announce",
    "check_scheme",
    "choose",
    "sum_gradients",
]
