"""Tables split over the ranks of an axis: one file a placement, and the exchanges that several tables share."""

from tulle.tables.bundle import Request, Route
from tulle.tables.closures import called_first
from tulle.tables.distinct import Ids
from tulle.tables.division import Division, divide
from tulle.tables.exchange import (
    Pushed,
    bundles,
    fetch,
    push,
    refuse,
    request_of,
    tell,
    tell_of_gradients,
    tell_the_end,
    tell_unlike,
    uneven,
)
from tulle.tables.gradient import ShardGradient, gradient_of_part
from tulle.tables.modules import Lookup, TableModule, has_own_forward, table_modules, table_of
from tulle.tables.part import gradient_of_table, guard_table
from tulle.tables.placements import COLUMNS, PLACEMENTS, placement_of, split_as
from tulle.tables.plain_steps import plain_in_step, step_plainly
from tulle.tables.split import ColumnSplit, RowSplit, Split, split_of

__all__ = [
    "COLUMNS",
    "PLACEMENTS",
    "ColumnSplit",
    "Division",
    "Ids",
    "Lookup",
    "Pushed",
    "Request",
    "Route",
    "RowSplit",
    "ShardGradient",
    "Split",
    "TableModule",
    "bundles",
    "called_first",
    "divide",
    "fetch",
    "gradient_of_part",
    "gradient_of_table",
    "guard_table",
    "has_own_forward",
    "placement_of",
    "plain_in_step",
    "push",
    "refuse",
    "request_of",
    "split_as",
    "split_of",
    "step_plainly",
    "table_modules",
    "table_of",
    "tell",
    "tell_of_gradients",
    "tell_the_end",
    "tell_unlike",
    "uneven",
]
