"""From what was asked for, or measured, to a `Plan`: pure, so that ranks that know the same decide the same."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tulle.cost import Network
from tulle.errors import PlanError
from tulle.names import was_meant
from tulle.plan.plan import Plan
from tulle.plan.splitting import Candidate, choose_all
from tulle.plan.table_plan import TablePlan
from tulle.sync import AUTO, check_scheme
from tulle.tables import PLACEMENTS

PlanLike = Plan | str | os.PathLike[str] | Mapping[str, Any]
"""A plan, also as the JSON of one, `"auto"`, one scheme for all tables, a scheme by table, or a saved plan's path."""
PLAN = "TULLE_PLAN"
"""Names a plan that stands in for `"auto"`; set by `tulle run --plan`."""
Shapes = Mapping[str, tuple[int, int]]
"""`(rows, width)` of each table with sparse gradients, by name."""


def plan_as_given(
    given: PlanLike, mesh: Mapping[str, int], shapes: Shapes, dense: Shapes = MappingProxyType({})
) -> Plan | None:
    """The plan that a user's argument stands for, or None for `"auto"`.

    Args:
        given: What the user gave.
        mesh: Size of each axis by name.
        shapes: Tables with sparse gradients.
        dense: Tables with dense gradients or none. They are sent whole, or by rows where that is faster, unless they
            are named: then by this scheme, whole with `"densify"`, or split.

    Raises:
        PlanError: If it stands for none, or is for other tables or another mesh.

    Example:
        >>> plan_as_given("allgather", {"data": 2}, {"words": (1000, 8)}).schemes
        {'words': 'allgather'}
    """
    if isinstance(given, Plan):
        plan = given
    elif isinstance(given, os.PathLike) or (isinstance(given, str) and Path(given).suffix == ".json"):
        plan = Plan.load(given)
    elif isinstance(given, str):
        if check_scheme(given, extra=(AUTO, *PLACEMENTS, "the path of a saved plan (*.json)")) == AUTO:
            return None
        named = {**shapes, **dense} if given in PLACEMENTS else shapes
        plan = _with_schemes(dict.fromkeys(named, given), mesh, shapes, dense)
    elif isinstance(given, Mapping) and isinstance(given.get("format"), int):
        plan = Plan.read(given)
    elif isinstance(given, Mapping):
        plan = _with_schemes(_by_parameter(given, [*shapes, *dense]), mesh, shapes, dense)
    else:
        raise PlanError(
            f"plan was given a {type(given).__name__}, expected 'auto', a scheme, a mapping, a Plan or a path"
        )
    plan.check(mesh, {**shapes, **dense})
    return plan


def replayed(given: PlanLike, environment: Mapping[str, str] = os.environ) -> PlanLike:
    """What a user gave, or, for `"auto"`, the plan that the environment names.

    Example:
        >>> replayed("auto", {PLAN: "plan.json"}), replayed("densify", {PLAN: "plan.json"}), replayed("auto", {})
        (PosixPath('plan.json'), 'densify', 'auto')
    """
    named = environment.get(PLAN)
    return Path(named) if named and isinstance(given, str) and given == AUTO else given


def plan_by_cost(mesh: Mapping[str, int], tables: Mapping[str, Candidate], network: Network, ranks: int) -> Plan:
    """The plan of least predicted seconds for tables whose gradients look like this.

    A table with dense gradients is in it only if it is split.
    """
    planned: list[TablePlan] = []
    for name, choice in choose_all(tables, network, ranks).items():
        looks = tables[name].looks
        if choice.scheme in PLACEMENTS or not tables[name].is_dense:
            planned.append(TablePlan(name, looks.num_rows, looks.width, AUTO).with_choice(choice, None))
    # The network of one process has no numbers that JSON could hold.
    return Plan(dict(mesh), tuple(planned), network=network if ranks > 1 else None)


def plan_for_later(mesh: Mapping[str, int], shapes: Shapes) -> Plan:
    """The plan that leaves each table's scheme to its first gradients."""
    return _with_schemes({}, mesh, shapes, {}, reason="to be chosen by the first gradients")


def _by_parameter(schemes: Mapping[str, str], tables: Sequence[str]) -> dict[str, str]:
    """The same by parameter: a table may be named by its module too, as in `tulle.lookahead`.

    Example:
        >>> _by_parameter({"words": "rows"}, ["words.weight"]), _by_parameter({"word": "rows"}, ["words.weight"])
        ({'words.weight': 'rows'}, {'word': 'rows'})
    """
    modules = {name.removesuffix(".weight"): name for name in tables if name not in schemes}
    return {modules.get(name, name): scheme for name, scheme in schemes.items()}


def _with_schemes(
    schemes: Mapping[str, str], mesh: Mapping[str, int], shapes: Shapes, dense: Shapes, *, reason: str = "given"
) -> Plan:
    for name, scheme in schemes.items():
        if name not in shapes and name not in dense:
            known = ", ".join(shapes) or "none"
            splittable = f"; those that can be split besides: {', '.join(dense)}" if dense else ""
            stages = "; stages of modules go into tulle.Plan(mesh.shape, stages=...)" if isinstance(scheme, int) else ""
            raise PlanError(
                f"the plan names {name!r}, the model's tables with sparse gradients are: {known}{splittable}"
                f"{was_meant(name, [*shapes, *dense])}{stages}"
            )
    tables = [
        TablePlan(name, rows, width, check_scheme(schemes.get(name, AUTO), extra=(AUTO, *PLACEMENTS)), reason)
        for name, (rows, width) in {**shapes, **dense}.items()
        if name in shapes or name in schemes
    ]
    return Plan(dict(mesh), tuple(tables))
