"""Planning: pure, values in and a frozen `Plan` out."""

from tulle.memory import Memory
from tulle.plan.choice import PLAN, PlanLike, plan_as_given, plan_by_cost, plan_for_later, replayed
from tulle.plan.drift import Drift, are_apart
from tulle.plan.explanation import differences, explained
from tulle.plan.footprint import Footprint, footprints
from tulle.plan.lower import lower
from tulle.plan.plan import AT_READ, AT_STEP, BUCKET_BYTES, Plan
from tulle.plan.prediction import Prediction
from tulle.plan.search import best_plan
from tulle.plan.shelf import Shelf
from tulle.plan.space import Space
from tulle.plan.splitting import Candidate
from tulle.plan.table_plan import TablePlan

__all__ = [
    "AT_READ",
    "AT_STEP",
    "BUCKET_BYTES",
    "PLAN",
    "Candidate",
    "Drift",
    "Footprint",
    "Memory",
    "Plan",
    "PlanLike",
    "Prediction",
    "Shelf",
    "Space",
    "TablePlan",
    "are_apart",
    "best_plan",
    "differences",
    "explained",
    "footprints",
    "lower",
    "plan_as_given",
    "plan_by_cost",
    "plan_for_later",
    "replayed",
]
