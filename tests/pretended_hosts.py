"""`pretend_hosts`: ranks of this host, as if they were some of each of several."""

from rank_process import patches
from tulle.environment import Launch
from tulle.shared_memory.neighbours import Neighbours


def pretend_hosts(ranks_per_host: int) -> None:
    """Have so many ranks in turn be on one host, until the test ends: call it before the mesh is made."""
    can_share = Neighbours.can_share

    def on_one_host(self: Neighbours, ranks: tuple[int, ...]) -> bool:
        return len({rank // ranks_per_host for rank in ranks}) == 1 and can_share(self, ranks)

    patches.setattr(Neighbours, "can_share", on_one_host)
    patches.setattr(Launch, "host_of", lambda self, rank: rank // ranks_per_host)
