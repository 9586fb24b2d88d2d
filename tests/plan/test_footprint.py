"""What a rank is predicted to need of memory, where a batch is cut into micro-batches."""

from profiles import cluster_of, profile_of
from tulle.plan import Plan, footprints


def in_two(profile, micro_batches, replicas=1):
    stages = {piece.name: 2 * number // len(profile.modules) for number, piece in enumerate(profile.modules)}
    plan = Plan({"pipe": 2, "data": replicas}, stages=stages, micro_batches=micro_batches)
    return footprints(plan, profile, cluster_of(2 * replicas))


def test_gradients_that_add_up_over_micro_batches_stay_beside_activations():
    profile = profile_of(activations=10)
    for one, some in zip(in_two(profile, 1), in_two(profile, 4), strict=True):
        kept_bytes = one.parameters_bytes + one.optimizer_bytes
        assert one.peak_bytes == kept_bytes + max(one.activations_bytes, one.gradients_bytes)
        assert some.peak_bytes > kept_bytes + some.activations_bytes + one.gradients_bytes, "and of one piece, apart"
        assert {"activations", "gradients"} <= some.parts_bytes().keys()


def test_gradients_of_micro_batches_travel_beside_their_sums():
    profile = profile_of(activations=10)
    pairs = zip(in_two(profile, 4), in_two(profile, 4, replicas=2), strict=True)
    travelling_bytes = sum(two.transient_bytes - one.transient_bytes for one, two in pairs)
    assert travelling_bytes == sum(piece.parameters_bytes for piece in profile.modules)
