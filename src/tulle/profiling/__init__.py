"""What a plan rests on: what a model's training step does, measured."""

from tulle.profiling.measure import profile
from tulle.profiling.script import PROFILE, profile_later
from tulle.profiling.tables import call, rows_touched, sparse_tables, trained_tables

__all__ = [
    "PROFILE",
    "call",
    "profile",
    "profile_later",
    "rows_touched",
    "sparse_tables",
    "trained_tables",
]
