"""The run-time of data parallelism: buckets of dense gradients, tables of sparse ones, replicas and their buffers."""

from tulle.engine.data_parallel import ENGINE, DataParallel, engine_of
from tulle.engine.replicas import broadcast_tensors, check_alike

__all__ = ["ENGINE", "DataParallel", "broadcast_tensors", "check_alike", "engine_of"]
