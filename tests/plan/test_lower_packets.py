"""Few rows of tables as tasks: they travel in one message, and are priced so."""

from dataclasses import replace

import pytest
import torch

from profiles import cluster_of, profile_of
from tulle.cost import Cost
from tulle.plan import Plan, Space, best_plan, lower
from tulle.plan.exchange import Tariff
from tulle.plan.work import share_of
from tulle.sync import AUTO, Packet, Table
from tulle.sync.packet import WORDS, Section, room_for
from tulle.tables import PLACEMENTS


def options_of(profile, cluster):
    """Ways for the table by name, on two ranks."""
    share = share_of(Plan({"data": 2}), profile, 16)
    network = share.network("data", cluster, profile)
    options = Tariff(profile).options(["embed.weight"], network, ranks=2, batches=share.batches)
    return {one.scheme: one for one in options}, network


def test_few_rows_are_priced_as_the_message_in_which_they_travel():
    few, cluster = profile_of(0, tokens=40), cluster_of(2)
    ways, network = options_of(few, cluster)
    assert {*ways} == {AUTO, *PLACEMENTS}
    room = room_for(max(Tariff(few).looks("embed.weight", 2, 1.0).rows_per_rank))
    packet = Packet([Table("", 4000, 32, torch.float32, torch.device("cpu"))], [Section([0], room)], WORDS)
    assert ways[AUTO].total == Cost(packet.bytes, 1, packet.seconds(network, 2)), "as the run-time prices it"
    plan = best_plan(few, cluster, space=Space(mesh={"data": 2}))
    assert plan.schemes == {"embed.weight": AUTO}
    assert "in one message" in plan.tables[0].reason
    assert {*plan.tables[0].candidates} == {AUTO, *PLACEMENTS}
    assert [task.name for task in lower(plan, few, cluster).tasks if task.kind == "sparse"] == ["auto embed.weight"]
    many, _ = options_of(profile_of(0, tokens=30_000, rows=100_000), cluster)
    assert AUTO not in many


def test_few_rows_of_tables_of_several_widths_are_priced_as_one_message():
    few, cluster = profile_of(0, tokens=40), cluster_of(2)
    names = ["embed.weight", "narrow"]
    both = replace(few, tables=(*few.tables, replace(few.tables[0], name="narrow", width=1)))
    ways, network = options_of(few, cluster)
    room = room_for(max(Tariff(few).looks("embed.weight", 2, 1.0).rows_per_rank))
    tables = [
        Table(name, 4000, width, torch.float32, torch.device("cpu")) for name, width in zip(names, (32, 1), strict=True)
    ]
    seconds = Packet(tables, [Section([0], room), Section([1], room)], 2 * WORDS).seconds(network, 2)
    plan = best_plan(both, cluster, space=Space(mesh={"data": 2}))
    assert plan.schemes == dict.fromkeys(names, AUTO)
    [sent] = [task for task in lower(plan, both, cluster).tasks if task.kind == "sparse"]
    assert (sent.name, sent.seconds) == ("auto embed.weight, narrow", pytest.approx(seconds)), "as the run-time has it"
    shares = [table.candidates[AUTO].seconds for table in plan.tables]
    assert sum(shares) == pytest.approx(seconds)
    assert 0 < shares[1] < shares[0] < ways[AUTO].total.seconds
    split = Plan({"data": 2}, (plan.tables[0], replace(plan.tables[1], scheme="rows")))
    [alone] = [task for task in lower(split, both, cluster).tasks if task.name == "auto embed.weight"]
    assert alone.seconds == pytest.approx(ways[AUTO].total.seconds), "one that is split is in no packet"
