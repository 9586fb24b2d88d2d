"""What several trips have in one exchange: the numbers of their rows are told, and rows that stay are fetched early."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from torch import Tensor

from tulle.comm import Job
from tulle.engine.trips import Told, Trip
from tulle.mesh import Axis
from tulle.tables import Early, Route, fetch_early, refuse, tell


def tell_together(trips: Sequence[Trip]) -> None:
    """Tell the owners the rows of some trips, in one exchange. Every rank must call it, alike.

    Which rows these are is found out by the background thread, beside what this one computes. If they are none of the
    tables', who asks for what was told hears of that; the other ranks do, too.

    Args:
        trips: Just made, in the order in which their values will be fetched, on one way.
    """
    way = trips[0].way
    told = way.background.submit(partial(_tell, trips, way.axis))
    for place, trip in enumerate(trips):
        trip.be_told(told, place, trips[-1])


def fetch_what_stays(trips: Sequence[Trip], before: Iterable[Callable[[], Sequence[Route]]]) -> None:
    """Fetch rows of the next trips that those before them leave alone, beside these. Every rank must call it, alike.

    Args:
        trips: Just told, on one way.
        before: Give the routes of all trips whose gradients the next step of an optimizer will apply.
    """
    way, known = trips[0].way, [*before]

    def work() -> list[Early]:
        wanted_now = [route for routes in known for route in routes()]
        return fetch_early([route for trip in trips for route in trip.routes_in_turn()], wanted_now, serve, way.axis)

    def serve(routes: Sequence[Route]) -> list[Sequence[Tensor]]:
        left = iter(routes)
        return [one for trip in trips for one in trip.serve([next(left) for _ in trip.bundles])]

    job, first = way.background.submit(work), 0
    for trip in trips:
        part = slice(first, first + len(trip.bundles))
        trip.early, first = partial(_part_of, job, part), part.stop


def _part_of(job: Job[list[Early]], part: slice) -> list[Early]:
    return job.result()[part]


def _tell(trips: Sequence[Trip], axis: Axis) -> list[Told]:
    try:
        requests = [trip.requests() for trip in trips]
    except (IndexError, TypeError):
        refuse([table.name for trip in trips for table in trip.tables.values()], axis)
        raise
    routes = iter(tell([one for of_trip in requests for one in of_trip], axis))
    return [Told(of_trip, [next(routes) for _ in of_trip]) for of_trip in requests]
