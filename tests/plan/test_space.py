"""A space names what may be chosen; what there is not is refused before anything is searched."""

import pytest

from profiles import cluster_of, profile_of
from tulle.errors import PlanError
from tulle.plan import Space, best_plan
from tulle.sync import SCHEMES


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"mesh": {"pip": 1}}, "has the axis 'pip', expected one of pipe, data, model"),
        ({"mesh": {"data": 0}}, "has 0 ranks along axis 'data', expected a positive number"),
        ({"mesh": {"data": "2"}}, "has '2' ranks along axis 'data'"),
        ({"schedules": "later"}, "has the schedule 'later', expected one of step, read"),
        ({"pipeline_schedules": ("1f1b", "zbh1")}, "has the pipeline_schedule 'zbh1', expected one of 1f1b"),
        ({"schemes": {"embed.weight": "rngi"}}, "unknown scheme 'rngi', .*; was 'ring' meant"),
    ],
)
def test_what_there_is_not_is_named(given, said):
    with pytest.raises(PlanError, match=said):
        Space(**given)


def test_a_scheme_for_a_table_that_the_profile_does_not_have_is_refused():
    profile, cluster = profile_of(), cluster_of(2)
    fixed = best_plan(profile, cluster, space=Space(mesh={"pipe": 1}, schemes={"embed.weight": "ring"}))
    assert fixed.schemes == {"embed.weight": "ring"}
    with pytest.raises(PlanError, match=r"for 'embed.wieght', the profile's tables are: embed.weight; was 'embed"):
        best_plan(profile, cluster, space=Space(schemes={"embed.wieght": "ring"}))


@pytest.mark.parametrize("ranks", [2, 16])
def test_a_table_fixed_to_auto_gets_a_scheme_and_no_placement(ranks):
    profile, cluster = profile_of(), cluster_of(ranks)
    plan = best_plan(profile, cluster, space=Space(mesh={"data": ranks}, schemes={"embed.weight": "auto"}))
    assert plan.schemes["embed.weight"] in {"auto", *SCHEMES}
    each = [
        best_plan(profile, cluster, space=Space(mesh={"data": ranks}, schemes={"embed.weight": scheme}))
        for scheme in ("ring", "densify", "allgather")
    ]
    assert all(plan.prediction.step_s <= one.prediction.step_s for one in each)
