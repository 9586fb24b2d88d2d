"""The choice of a scheme by cost: pure, and right where the answer is known."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from tulle.cost import Characteristics, Network
from tulle.errors import PlanError
from tulle.presence import Presence
from tulle.sync import SCHEMES, check_scheme, choose, choose_together
from tulle.sync.hierarchical import Hierarchical, best_pair
from tulle.sync.schemes import ALIKE, FLAT

SLOW = Network(latency_s=5e-4, bandwidth_bytes_per_s=1.2e8)


def table(rows: int, num_rows: int = 50_000, width: int = 512, ranks: int = 4) -> Characteristics:
    return Characteristics(num_rows, width, 4, (rows,) * ranks)


def seconds(scheme: str, look: Characteristics) -> float:
    return SCHEMES[scheme].cost(look, SLOW, len(look.rows_per_rank)).seconds


def test_a_few_rows_of_a_large_table_travel_as_rows():
    few = table(1400)
    assert choose(few, SLOW, 4).scheme != "densify"
    assert seconds("allgather", few) < seconds("densify", few) / 5


@pytest.mark.parametrize("ranks", [3, 4, 16, 64])
def test_an_assumed_sparse_gradient_is_reduced_and_not_gathered(ranks):
    choice = choose(table(50_000, ranks=ranks), SLOW, ranks)
    predicted = dict(choice.candidates)
    # Where every row is touched, pushing rows to owners and back is a dense all-reduce by another name: a near tie.
    assert choice.scheme == "densify" or predicted["densify"].seconds > ALIKE * predicted[choice.scheme].seconds
    assert predicted[choice.scheme].bytes < 1.01 * predicted["densify"].bytes
    assert predicted["allgather"].bytes == pytest.approx(ranks / 2 * predicted["densify"].bytes, rel=0.01)
    eager = replace(SLOW, all_reduce_latency_s=SLOW.latency_s, all_reduce_bytes_per_s=2 * SLOW.bandwidth_bytes_per_s)
    assert choose(table(50_000, ranks=ranks), eager, ranks).scheme == "densify"


def test_gathering_loses_to_reducing_as_ranks_grow():
    # Densifying Assumed-sparse Tensors, figure 3: Transformer-big at 5,000 tokens a process.
    looks = [table(4000, 33_708, 1024, ranks) for ranks in (2, 64)]
    assert seconds("allgather", looks[0]) < seconds("densify", looks[0])
    assert seconds("allgather", looks[1]) > 2 * seconds("densify", looks[1])
    assert choose(looks[1], SLOW, 64).scheme != "allgather"


def test_the_choice_lists_every_candidate_and_takes_the_simplest_of_about_the_least_seconds():
    for look in (table(10), table(1400), table(40_000), table(4000, ranks=16)):
        choice = choose(look, SLOW, len(look.rows_per_rank))
        predicted = {name: cost.seconds for name, cost in choice.candidates}
        assert predicted == {name: seconds(name, look) for name in FLAT}
        alike = [name for name in FLAT if predicted[name] <= ALIKE * min(predicted.values())]
        assert choice.scheme == alike[0]
        assert f"{choice.scheme} predicted at " in choice.reason
        assert "densify" in choice.reason, "what DDP would do with a dense gradient is always told"


@pytest.mark.parametrize(("ranks", "gathered", "reduced"), [(4, 3.0, 1.5), (64, 63.0, 2 * 63 / 64)])
def test_costs_are_those_of_the_papers(ranks, gathered, reduced):
    """Zen, table of costs: AGsparse (n - 1) d M, dense ring all-reduce 2 (n - 1) / n M."""
    look = table(rows=500, num_rows=50_000, width=512, ranks=ranks)
    d_m = look.density * look.dense_bytes
    assert SCHEMES["allgather"].cost(look, SLOW, ranks).bytes == pytest.approx(gathered * d_m, rel=0.01)
    assert SCHEMES["densify"].cost(look, SLOW, ranks).bytes == pytest.approx(reduced * look.dense_bytes, rel=0.01)


def test_seconds_are_latency_and_bytes_over_bandwidth():
    cost = SCHEMES["densify"].cost(table(500), SLOW, 4)
    rounds = 6 + 1  # of the all-reduce, and of the row numbers
    assert cost.seconds == pytest.approx(rounds * SLOW.latency_s + cost.bytes / SLOW.bandwidth_bytes_per_s)


@pytest.mark.parametrize("inside", [Network(1e-5, 1e10), Network(1e-4, 2e8), None])
@pytest.mark.parametrize("rows", [40, 4000])
def test_the_pair_of_schemes_is_the_best_of_all_and_hosts_are_looked_at_once(inside, rows, monkeypatch):
    network, looked = replace(SLOW, local_ranks=2, inside=inside, across=SLOW), []
    look = table(rows, ranks=6)
    every = [Hierarchical(*pair).cost(look, network, 6).seconds for pair in product(FLAT.values(), repeat=2)]
    among = Characteristics.among
    monkeypatch.setattr(Characteristics, "among", lambda *given: looked.append(given) or among(*given))
    pair = best_pair(FLAT, look, network, 6)
    assert Hierarchical(*(FLAT[name] for name in pair)).cost(look, network, 6).seconds == pytest.approx(min(every))
    of_hosts = [members for _, members in looked if len(members) == 2]
    assert len(of_hosts) == (2 * 3 if inside else 0), "three hosts, for the choice and for its price"


def test_an_unknown_scheme_is_named_with_those_that_there_are():
    with pytest.raises(PlanError, match=rf"^unknown scheme 'zen', expected one of auto, {', '.join(SCHEMES)}$"):
        check_scheme("zen")
    assert all(check_scheme(name) == name for name in ("auto", *SCHEMES, "hierarchical:allgather+balanced"))


def recommender(ranks: int = 8) -> list[Characteristics]:
    """Small and large tables, as categorical features have them."""
    rows = [(1460, 583), (100_000, 700), (305, 200), (24, 24), (93_145, 600), (5683, 500)] * 4
    return [Characteristics(num_rows, 16, 4, (held,) * ranks) for num_rows, held in rows]


def test_tables_that_travel_as_one_are_chosen_for_as_one():
    looks = recommender()
    together = choose_together(looks, SLOW, 8)
    [scheme] = {choice.scheme for choice in together}
    predicted = dict(together[0].candidates)
    # One by one, each pays the latencies that they share: then the scheme of fewest rounds is best for each.
    alone = [choose(look, SLOW, 8) for look in looks]
    assert {choice.scheme for choice in alone} != {scheme}
    most_common = max({choice.scheme for choice in alone}, key=[choice.scheme for choice in alone].count)
    assert predicted[scheme].seconds < predicted[most_common].seconds
    assert all(dict(choice.candidates)[scheme].seconds == predicted[scheme].seconds for choice in together)
    assert "8 ranks as one with 23 other tables: " in together[0].reason


def test_what_tables_that_travel_as_one_cost_is_one_latency_and_the_sum_of_their_bytes():
    looks = recommender(ranks=4)
    whole = Characteristics.end_to_end(looks)
    assert whole.num_rows == sum(look.num_rows for look in looks)
    assert whole.union_rows == pytest.approx(sum(look.union_rows for look in looks), abs=len(looks))
    gather = SCHEMES["allgather"]
    costs = [gather.cost(look, SLOW, 4) for look in looks]
    cost = gather.cost(whole, SLOW, 4)
    assert cost.messages == costs[0].messages
    # A bitmap of a small table's rows is shorter than a list of numbers in all tables.
    assert cost.bytes == pytest.approx(sum(cost.bytes for cost in costs), rel=0.05)
    assert cost.seconds == pytest.approx(2 * SLOW.latency_s + cost.bytes / SLOW.bandwidth_bytes_per_s)
    shares = [dict(choice.candidates)["allgather"] for choice in choose_together(looks, SLOW, 4)]
    assert sum(share.bytes for share in shares) == pytest.approx(cost.bytes, abs=len(looks))


def test_of_tables_sampled_and_whole_the_same_share_of_rows_is_kept():
    generator = torch.Generator().manual_seed(1)

    def measured(num_rows: int, rows: int, share: float) -> Characteristics:
        sampled = [torch.randperm(num_rows, generator=generator)[: round(share * rows)].sort().values for _ in range(3)]
        presence = replace(Presence.of(sampled), share=share)
        return Characteristics(num_rows, 8, 4, (rows,) * 3, presence)

    parts = [measured(1_000_000, 40_000, 0.25), measured(20_000, 8_000, 1.0)]
    both = Characteristics.end_to_end(parts)
    assert both.spread.share == 0.25
    assert both.union_rows == pytest.approx(sum(part.union_rows for part in parts), rel=0.02)
    assert both.spread.rows.diff().min() > 0
