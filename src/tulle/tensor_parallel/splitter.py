"""`Splitter`: what a factory is given to split a module: the moves of which each architecture's rule is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from tulle.derived import kind_of_forward
from tulle.errors import ModelError
from tulle.mesh import Axis
from tulle.names import as_names
from tulle.tensor_parallel.attention import SplitAttention
from tulle.tensor_parallel.casting import writes_out_linear
from tulle.tensor_parallel.dropout import OwnRandomness, SplitDropout
from tulle.tensor_parallel.embedding import VocabularyEmbedding
from tulle.tensor_parallel.linear import (
    Column,
    RowLinear,
    RowTransposed,
    SharedRows,
    is_transposed,
    outputs_of,
    summed_over,
    take_on,
)
from tulle.tensor_parallel.placement import Placement, length_on, place
from tulle.tensor_parallel.region import Entrance, Exit, LastEnter, OfFirst, Region, Sequences
from tulle.traits import hold


class MisfitError(ModelError):
    """A module's heads do not divide among ranks, or a layer in it is no plain one."""


@dataclass(frozen=True, slots=True)
class Splitter:
    """Splits the layers of one module over an axis, in place: parameters, names and hooks stay the same objects.

    Args:
        axis: Whose ranks each hold a part.
        name: The module's name in the model; errors and traffic counters use it.
        sequence_dim: The dimension along which activations between layers are split; None if they are whole.
        cuts: Every parameter that was cut so far, with its placement, by identity: tied ones are cut once.
    """

    axis: Axis
    name: str = "the module"
    sequence_dim: int | None = None
    cuts: dict[int, tuple[Tensor, Placement]] = field(default_factory=dict)

    @property
    def region(self) -> Region:
        """Where this module's work is split."""
        return Region(self.axis, self.name, self.sequence_dim)

    @property
    def whole_region(self) -> Region:
        """The same for arguments that are whole on every rank even where activations are split along sequences."""
        return Region(self.axis, self.name)

    def within(self, name: str, *, sequence_dim: int | None = None) -> Splitter:
        """The splitter for another module of the same model."""
        return replace(self, name=name, sequence_dim=sequence_dim)

    def enter(self, module: nn.Module, *names: str, whole: Sequence[str] = ()) -> None:
        """Have some arguments of a module's forward enter once, for all the column layers in it.

        Args:
            module: Whose forward takes them.
            names: Arguments that come as activations do between layers.
            whole: Arguments that are whole on every rank in any case.
        """
        regions = {name: self.region for name in names} | {name: self.whole_region for name in as_names(whole)}
        module.register_forward_pre_hook(Entrance(module, regions), with_kwargs=True)

    def leave(self, module: nn.Module) -> None:
        """Have the result of a module's forward, whole on every rank afterwards, be summed over the ranks."""
        module.register_forward_hook(Exit(self.whole_region))

    def last_enter(self, linear: nn.Module, count: int) -> None:
        """Have the last features of what a layer gives, whole on every rank, enter: all ranks' heads use these."""
        linear.register_forward_hook(LastEnter(self.whole_region, count))

    def whole_within(self, module: nn.Module) -> None:
        """Have a module see whole sequences and give whole ones, where they are split between layers.

        For what does the same on all ranks but where it says otherwise, such as a router.
        """
        if self.sequence_dim is not None:
            sequences = Sequences(self.region)
            module.register_forward_pre_hook(sequences.gather_before, with_kwargs=True)
            module.register_forward_hook(sequences.scatter_after)

    def column(self, linear: nn.Module, *, sections: Sequence[int] | None = None) -> None:
        """Split a linear layer by output features; what is around it lets the input enter, and uses its own part.

        Args:
            linear: An `nn.Linear`, or a `Conv1D` of transformers.
            sections: Lengths of what is fused in it, such as queries, keys and values; each is split.
        """
        self._cut_columns(linear, sections)
        take_on(linear, Column, region=None, gathered=None)

    def column_alone(self, linear: nn.Module, *, gather: bool = True, sections: Sequence[int] | None = None) -> None:
        """Split a linear layer by output features, between layers that know nothing of it.

        Args:
            linear: An `nn.Linear`, or a `Conv1D` of transformers.
            gather: Whether every rank gets all features; else its own part, for a row layer.
            sections: Lengths of what is fused in it, each of which is split, if it is not gathered.
        """
        features = self.features(linear)
        self._cut_columns(linear, sections)
        if gather and isinstance(linear, nn.Linear):
            linear.out_features = features  # that is what it gives
        take_on(linear, Column, region=self.region, gathered=features if gather else None)

    def row(self, linear: nn.Module) -> None:
        """Split a linear layer by input features: it takes what column layers give, and gives sums to every rank."""
        self._check_linear(linear)
        if is_transposed(linear):
            self.cut(linear, "weight", dim=0)
            take_on(linear, RowTransposed, region=self.region)
        else:
            self.cut(linear, "weight", dim=1)
            if isinstance(linear, nn.Linear):
                linear.in_features = self.own(linear.in_features)
            take_on(linear, RowLinear, region=self.region, is_cast=writes_out_linear(linear))
        self.norm(linear, "bias")

    def shared_rows(self, linear: nn.Module, rows: slice) -> None:
        """Have a linear layer, whole on every rank, give some of its output features."""
        self._check_linear(linear)
        take_on(linear, SharedRows, rows=rows, is_cast=writes_out_linear(linear))
        summed_over(linear, [*linear._parameters], self.region)

    def vocabulary(self, embedding: nn.Embedding) -> None:
        """Split an embedding by rows."""
        if not has_plain_rows(embedding):
            raise ModelError(
                f"{self.name} is an embedding with max_norm, scale_grad_by_freq or sparse gradients, which is not "
                "split over a model axis: leave it out with select, or split it over the data axis by tulle.distribute"
            )
        rows = embedding.num_embeddings
        first = sum(length_on(rank, rows, self.axis.size) for rank in range(self.axis.rank))
        self.cut(embedding, "weight", dim=0)
        take_on(embedding, VocabularyEmbedding, inside=True, region=self.region, first=first)

    def attention(self, attention: nn.MultiheadAttention) -> None:
        """Split a `nn.MultiheadAttention` by heads; keys and values other than the queries are whole in any case."""
        if has_own_keys(attention):
            raise ModelError(
                f"{self.name} has add_bias_kv or add_zero_attn, which cannot be split by heads here: make it without, "
                "or leave it out with select"
            )
        heads = self.heads(attention.num_heads)
        for name in ("in_proj_weight", "in_proj_bias"):
            self.cut(attention, name, dim=0, sections=[attention.embed_dim] * 3)
        for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
            self.cut(attention, name, dim=0)
        # It sees sequences first, whatever the order outside.
        replace(self, sequence_dim=None if self.sequence_dim is None else 0).row(attention.out_proj)
        attention.num_heads = heads
        own = slice(self.axis.rank * heads, (self.axis.rank + 1) * heads)
        queries, randomness = self.region, OwnRandomness(self.region)
        take_on(attention, SplitAttention, queries=queries, whole=self.whole_region, heads=own, randomness=randomness)

    def heads(self, count: int) -> int:
        """This rank's number of heads.

        Raises:
            ModelError: If they do not divide evenly.
        """
        if count % self.axis.size:
            raise MisfitError(
                f"{self.name} has {count} heads, which do not divide among the {self.axis.size} ranks of axis "
                f"{self.axis.name!r}: use an axis whose size divides {count}, or leave the module out with select"
            )
        return count // self.axis.size

    def shared_head(self, queries: int, pairs: int) -> int:
        """The head of keys and values that this rank's queries need, where there are fewer of them than ranks.

        Args:
            queries: How many heads of queries there are.
            pairs: How many of keys, and of values.

        Raises:
            ModelError: If ranks are no multiple of these.
        """
        own, ranks = queries // self.axis.size, self.axis.size
        if ranks % pairs:
            raise MisfitError(
                f"{self.name} has {pairs} heads of keys and values for {queries} of queries, which do not divide among "
                f"the {ranks} ranks of axis {self.axis.name!r}: use a size that divides {pairs}, or is a multiple of "
                "it, or leave the module out with select"
            )
        first, last = self.axis.rank * own * pairs // queries, ((self.axis.rank + 1) * own - 1) * pairs // queries
        assert first == last, "queries of one rank share a head where ranks are a multiple of the heads"
        return first

    def features(self, linear: nn.Module) -> int:
        """The number of output features that a linear layer gives, not split yet.

        Raises:
            ModelError: If it is not a linear layer.
        """
        if isinstance(linear, nn.Linear):
            return linear.out_features
        if is_transposed(linear):
            return outputs_of(linear)
        raise self._is_no_linear(linear)

    def norm(self, module: nn.Module | None, *names: str) -> None:
        """Keep a module's parameters whole; along sequences, each rank has a part of their gradients to be summed.

        Args:
            module: A norm, say; None is nothing to do.
            names: Which of its own parameters; none for all.
        """
        if module is None or self.sequence_dim is None:
            return
        summed_over(module, [name for name in module._parameters if name in names or not names], self.region)

    def summed(self, module: nn.Module | None) -> None:
        """Sum the gradients of a module that is whole on every rank and applied to each rank's own heads."""
        for one in module.modules() if module is not None else ():
            if one._parameters:
                summed_over(one, [*one._parameters], self.region)

    def added_once(self, module: nn.Module, name: str) -> None:
        """Have one rank alone use a parameter, whole on every rank, in what is summed over the ranks afterwards."""
        if module._parameters.get(name) is not None:
            summed_over(module, [name], OfFirst(self.axis, self.region.label))

    def hidden_dropout(self, dropout: nn.Module, features: int | None = None) -> None:
        """Dropout between a column and a row layer, of so many features in all."""
        self._split_dropout(dropout, -1, features)

    def residual_dropout(self, *dropouts: nn.Module) -> None:
        """Dropout between regions, of activations that may be split along sequences."""
        for dropout in dropouts:
            if self.sequence_dim is not None:
                self._split_dropout(dropout, self.sequence_dim, None)

    def own_randomness(self, begin: nn.Module, *, end: nn.Module) -> None:
        """Have a rank draw numbers of its own between the forward of a module and that of one within it."""
        randomness = OwnRandomness(self.region)
        begin.register_forward_pre_hook(randomness.begin)
        begin.register_forward_hook(randomness.end, always_call=True)  # after an error, too
        if begin is not end:
            end.register_forward_pre_hook(randomness.end)

    def cut(self, module: nn.Module, name: str, *, dim: int, sections: Sequence[int] | None = None) -> None:
        """Have a module's parameter, if it has one of that name, hold this rank's part only.

        A buffer too, such as one number a head, if no checkpoint has it.

        Args:
            module: Whose parameter, or buffer.
            name: Its name in the module.
            dim: The dimension that is cut.
            sections: Lengths of the sections along it, each of which is cut; one if None.

        Raises:
            ModelError: If it is tied to one that is cut another way, of another module, too short for the ranks, or a
                buffer that `state_dict` has.
        """
        if module._buffers.get(name) is not None:
            self._cut_buffer(module, name, dim, sections)
            return
        parameter = self._own_parameter(module, name)
        if parameter is None:
            return
        known = self.cuts.get(id(parameter))
        shape = known[1].shape if known else parameter.shape
        placement = self._placement(name, shape, dim, sections)
        if known is None:
            parameter.grad = None
            hold(parameter, placement.part(parameter))
            self.cuts[id(parameter)] = parameter, placement
        elif known[1] != placement:
            raise ModelError(
                f"{self.name} would cut {name} along dimension {dim} in sections {list(placement.sections)}, but it is "
                f"tied to a parameter that is cut along dimension {known[1].dim} in sections "
                f"{list(known[1].sections)}: untie them, or leave one of the modules out with select"
            )
        place(module, name, placement)

    def _placement(self, name: str, shape: torch.Size, dim: int, sections: Sequence[int] | None) -> Placement:
        placement = Placement(self.axis, dim, shape, tuple(sections or [shape[dim]]))
        if min(placement.sections) < self.axis.size:
            raise ModelError(
                f"{self.name} has {name} of shape {list(shape)}, too short along dimension {dim} for the "
                f"{self.axis.size} ranks of axis {self.axis.name!r}: leave it out with select"
            )
        return placement

    def _cut_buffer(self, module: nn.Module, name: str, dim: int, sections: Sequence[int] | None) -> None:
        if name not in module._non_persistent_buffers_set:
            raise ModelError(
                f"{self.name} has a buffer {name}, of which each checkpoint would have one rank's "
                "part: register it with persistent=False, or make it a parameter"
            )
        whole = module.get_buffer(name)
        module._buffers[name] = self._placement(name, whole.shape, dim, sections).part(whole).clone()

    def _own_parameter(self, module: nn.Module, name: str) -> nn.Parameter | None:
        """The parameter of a name that a module itself has, and nobody makes or lends; None if there is none."""
        parameter = getattr(module, name, None)
        if parameter is None:
            return None
        if not isinstance(parameter, nn.Parameter):
            raise ModelError(
                f"{self.name} has no parameter {name}: it is made of others, as by weight_norm, and cannot be cut: "
                "leave the module out with select"
            )
        if parameter is not module._parameters.get(name):
            raise MisfitError(
                f"{self.name} has the {name} of another module, as an adapter around a layer does (peft), whose own "
                "parameters would not be cut with it: leave the module out with select, or of Plan.tensor_parallel"
            )
        return parameter

    def _check_linear(self, linear: nn.Module) -> None:
        """Refuse what computes something of its own, which the forward of a split layer would leave away."""
        if not computes_linear(linear):
            raise self._is_no_linear(linear)

    def _is_no_linear(self, layer: nn.Module) -> MisfitError:
        return MisfitError(
            f"{self.name} has a {type(layer).__name__} with a forward of its own where an nn.Linear was expected, as "
            "an adapter (LoRA) has, which a split would leave away: leave the module out with select, or of "
            "Plan.tensor_parallel, or register a factory for its class"
        )

    def _cut_columns(self, linear: nn.Module, sections: Sequence[int] | None) -> None:
        if "forward" in vars(linear) or getattr(linear, "weight", None) is None:
            raise self._is_no_linear(linear)
        self.cut(linear, "weight", dim=1 if is_transposed(linear) else 0, sections=sections)
        self.cut(linear, "bias", dim=0, sections=sections)
        setattr(linear, "nf" if is_transposed(linear) else "out_features", outputs_of(linear))

    def _split_dropout(self, dropout: nn.Module, dim: int, whole: int | None) -> None:
        if not isinstance(dropout, nn.Dropout | nn.Identity):
            raise ModelError(f"{self.name} has a dropout of class {type(dropout).__name__}, expected nn.Dropout")
        if isinstance(dropout, nn.Dropout):
            take_on(dropout, SplitDropout, region=self.region, dim=dim, whole=whole)

    def own(self, length: int) -> int:
        """This rank's part of so many features."""
        return length_on(self.axis.rank, length, self.axis.size)


_LINEAR = ("transformers.models.falcon.modeling_falcon.FalconLinear",)
"""Classes whose own forward writes out what that of `nn.Linear` does."""


def computes_linear(layer: nn.Module) -> bool:
    """Whether a layer has the forward of `nn.Linear`, or of a `Conv1D` of transformers, and nothing of its own."""
    if "forward" in vars(layer):
        return False
    kind = kind_of_forward(layer)
    is_known = vars(kind)["forward"] is nn.Linear.forward or f"{kind.__module__}.{kind.__qualname__}" in _LINEAR
    return is_transposed(layer) or (isinstance(layer, nn.Linear) and (is_known or writes_out_linear(layer)))


def has_own_keys(attention: nn.MultiheadAttention) -> bool:
    """Whether an attention adds a key and a value of its own to those that it is given, which are not cut by heads."""
    return attention.bias_k is not None or attention.add_zero_attn


def has_plain_rows(embedding: nn.Embedding) -> bool:
    """Whether an embedding's rows can be split over an axis: they get dense gradients, and no lookup changes them."""
    return embedding.max_norm is None and not embedding.scale_grad_by_freq and not embedding.sparse
