"""Planning: pure, values in and a frozen `Plan` out."""

from tulle.plan.choice import PlanLike, plan_as_given, plan_by_cost, plan_for_later
from tulle.plan.plan import AT_READ, AT_STEP, BUCKET_BYTES, Plan, TablePlan
from tulle.plan.splitting import Candidate

__all__ = [
    "AT_READ",
    "AT_STEP",
    "BUCKET_BYTES",
    "Candidate",
    "Plan",
    "PlanLike",
    "TablePlan",
    "plan_as_given",
    "plan_by_cost",
    "plan_for_later",
]
