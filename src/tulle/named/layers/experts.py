"""`Experts`: a mixture of feed-forward layers, of which each position goes through one or two.

    probabilities      (batch, length, gates)                   gates are the experts before they are laid out
    dispatch           (batch, length, gates, capacity)         who goes where: each expert has room for so many
    inputs             (gates, batch, capacity, d_model)        by a product
    renamed            (experts, groups, capacity, d_model)     all-to-all, where batch and experts share an axis
    outputs            the way back, weighted by the gates

Source: Shazeer et al., *Outrageously Large Neural Networks* (2017); Lepikhin et al., *GShard* (2020), algorithm 1;
Fedus et al., *Switch Transformers* (2021), section 2.
"""

from __future__ import annotations

import math
from typing import Literal

import torch

from tulle.errors import ModelError
from tulle.named.dims import Dim
from tulle.named.module import Module, param
from tulle.named.pointwise import one_hot, relu
from tulle.named.reduction import cumsum, mean, softmax
from tulle.named.reduction import sum as named_sum
from tulle.named.selection import argmax
from tulle.named.tensor import Tensor, einsum


class Experts(Module):
    """A mixture of experts. Lay `experts` out over the axis of the batch, `d_ff` over another.

    Args:
        d_model: Of what comes in and goes out.
        d_ff: Inside an expert.
        experts: How many there are.
        gating: `"switch"` sends each position to the best expert, `"top-2"` to the best two.
        capacity_factor: Room of each expert for one batch entry's positions, as a multiple of an even share.

    Raises:
        ModelError: If the gating is neither.
    """

    def __init__(
        self,
        d_model: Dim,
        d_ff: Dim,
        experts: Dim,
        *,
        gating: Literal["switch", "top-2"] = "top-2",
        capacity_factor: float = 1.25,
    ) -> None:
        super().__init__()
        if gating not in ("switch", "top-2"):
            raise ModelError(f"Experts was given gating={gating!r}, expected 'switch' or 'top-2'")
        self.d_model, self.d_ff, self.experts = d_model, d_ff, experts
        self.choices = 2 if gating == "top-2" else 1
        self.capacity_factor = capacity_factor
        self.gates = Dim(f"{experts.name}_gates", experts.size)
        self.gate = param(d_model, self.gates)
        self.up, self.down = param(experts, d_model, d_ff, inputs=d_model), param(experts, d_ff, d_model, inputs=d_ff)

    def forward(self, x: Tensor, batch: Dim, length: Dim) -> tuple[Tensor, Tensor]:
        """What the experts make of each position, and the loss that keeps them evenly busy.

        Args:
            x: `(batch, length, d_model)`, in any order.
            batch: Its entries are routed each by itself.
            length: The positions, which compete for room.
        """
        room = math.ceil(self.choices * length.size * self.capacity_factor / self.experts.size)
        capacity = Dim("capacity", room)
        combine, balance = self._route(softmax(x.dot(self.gate, self.d_model), self.gates), length, capacity)
        dispatch = combine.map(lambda local: (local > 0).to(local.dtype))
        inputs = einsum(dispatch, x, out=(self.gates, batch, capacity, self.d_model))
        groups = Dim(f"{batch.name}_groups", batch.size)
        there = inputs.rename(**{self.gates.name: self.experts, batch.name: groups})
        made = relu(there.dot(self.up, self.d_model)).dot(self.down, self.d_ff)
        back = made.rename(**{self.experts.name: self.gates, groups.name: batch})
        return einsum(combine, back, out=(batch, length, self.d_model)), balance

    def _route(self, probabilities: Tensor, length: Dim, capacity: Dim) -> tuple[Tensor, Tensor]:
        """The weight of each position at each place of each expert; and the loss of balance."""
        dtype, left = probabilities.dtype, probabilities.detach()
        seats: list[Tensor] = []
        gates: list[Tensor] = []
        choices: list[Tensor] = []
        taken: Tensor | int = 0
        for _ in range(self.choices):
            chosen = one_hot(argmax(left, self.gates), self.gates, dtype=torch.int64)  # exact, however many there are
            place = (cumsum(chosen, length) + taken) * chosen - 1  # -1 where not chosen: in no room
            seat = one_hot(place, capacity, dtype=dtype)
            choices.append(chosen.to(dtype))
            gates.append(named_sum(probabilities * choices[-1], self.gates))
            seats.append(seat * choices[-1] * gates[-1])
            taken = named_sum(chosen, length) + taken
            left = left * (1 - chosen)
        balance = mean(mean(choices[0], length) * mean(probabilities, length)) * self.experts.size**2
        if self.choices == 1:
            return seats[0], balance
        return (seats[0] + seats[1]) / (gates[0] + gates[1]), balance
