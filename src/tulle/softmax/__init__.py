"""Cross entropy over huge tables, computed where the rows lie: exact, or in training against a sample of them."""

from tulle.softmax.layer import SoftmaxLayer
from tulle.softmax.negatives import LogUniform
from tulle.softmax.offer import offers
from tulle.softmax.sampled import SampledSoftmax
from tulle.softmax.sharded import ShardedSoftmax

__all__ = ["LogUniform", "SampledSoftmax", "ShardedSoftmax", "SoftmaxLayer", "offers"]
