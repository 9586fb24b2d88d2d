"""Pipelines over arbitrary models, without tracing: a module runs where it lives, and every rank runs the program."""

from tulle.pipeline.automatic import Dealt, deal
from tulle.pipeline.outputs import StepOutput
from tulle.pipeline.partition import Limits, Partition, Piece, partition
from tulle.pipeline.picture import picture
from tulle.pipeline.pins import pins_of, stage
from tulle.pipeline.place import Assignment, Placement, place, placement_of
from tulle.pipeline.step import step
from tulle.pipeline.usual import Usual, make_usual

__all__ = [
    "Assignment",
    "Dealt",
    "Limits",
    "Partition",
    "Piece",
    "Placement",
    "StepOutput",
    "Usual",
    "deal",
    "make_usual",
    "partition",
    "picture",
    "pins_of",
    "place",
    "placement_of",
    "stage",
    "step",
]
