"""The run-time of data parallelism: buckets of dense gradients, tables of sparse ones, replicas and their buffers."""

from tulle.engine.data_parallel import ENGINE, DataParallel, engine_of
from tulle.engine.replicas import broadcast_tensors, check_alike
from tulle.engine.tables import Observation, TableSettings

__all__ = ["ENGINE", "DataParallel", "Observation", "TableSettings", "broadcast_tensors", "check_alike", "engine_of"]
