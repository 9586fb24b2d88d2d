"""The run-time of data parallelism: buckets of dense gradients, tables of sparse ones, replicas and their buffers."""

from tulle.engine.data_parallel import DataParallel, engine_of_parameter
from tulle.engine.replicas import broadcast_tensors, check_alike

__all__ = ["DataParallel", "broadcast_tensors", "check_alike", "engine_of_parameter"]
