"""The run-time of data parallelism: buckets of dense gradients, tables of sparse ones, split tables, replicas."""

from tulle.engine.by_hand import average_by_hand
from tulle.engine.covered import watch_steps
from tulle.engine.data_parallel import ENGINE, DataParallel, engine_of, engines_of, living_engines, living_split_tables
from tulle.engine.feed import Feed
from tulle.engine.late_updates import check_reads
from tulle.engine.ledger import Observation
from tulle.engine.loops import is_looking_ahead, looking_ahead
from tulle.engine.replicas import broadcast_tensors, check_alike
from tulle.engine.split_modules import TAKE_PLAIN, adopt, check_not_captured
from tulle.engine.split_table import SplitTable
from tulle.engine.split_tables import SplitTables
from tulle.engine.tables import TableSettings

__all__ = [
    "ENGINE",
    "TAKE_PLAIN",
    "DataParallel",
    "Feed",
    "Observation",
    "SplitTable",
    "SplitTables",
    "TableSettings",
    "adopt",
    "average_by_hand",
    "broadcast_tensors",
    "check_alike",
    "check_not_captured",
    "check_reads",
    "engine_of",
    "engines_of",
    "is_looking_ahead",
    "living_engines",
    "living_split_tables",
    "looking_ahead",
    "watch_steps",
]
