"""Leaves of autograd that are the user's own: pictures that are attacked, latents and prompts that are learned.

All ranks have such a tensor alike, and what each computes of it until a stage reads that. Its gradient comes to the
ranks of these stages, to each a part, and is added up on all ranks as that of tied parameters is (`tied.Asides`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from tulle.errors import ModelError


def leaves_of(tensor: Tensor) -> list[Tensor]:
    """The leaves of autograd that a tensor is or was computed of, in an order that all ranks find alike."""
    if tensor.grad_fn is None:
        return [tensor]
    seen = {tensor.grad_fn: None}
    for node in (nodes := list(seen)):
        others = dict.fromkeys(one for one, _ in node.next_functions if one is not None and one not in seen)
        nodes += others
        seen |= others
    found = (getattr(node, "variable", None) for node in nodes)  # of a node that adds up a leaf's gradient
    return [leaf for leaf in found if leaf is not None]


def attributes_that_are_leaves(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Tensors that are no parameters, need a gradient and are attributes of modules, each once, with their names.

    Modules of any stage may read them.
    """
    found = {
        id(value): (f"{path}.{name}".lstrip("."), value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if type(value) is Tensor and value.requires_grad and value.is_leaf
    }
    return list(found.values())


def check_backward_of_all(losses: Tensor | Sequence[Tensor], read: Mapping[int, Tensor]) -> None:
    """Refuse a backward that all ranks run to what stages read, too: it would count once for each rank.

    Args:
        losses: That live at no stage.
        read: Tensors of the user's own that stages read, by identity.
    """
    given = [losses] if isinstance(losses, Tensor) else losses
    for leaf in (leaf for loss in given if loss.requires_grad for leaf in leaves_of(loss)):
        if id(leaf) in read:
            raise ModelError(
                f"backward was called on a loss that no stage computes, of a tensor of shape {list(leaf.shape)} that "
                "needs a gradient and that stages read, too: add that loss to the one that the model gives, and call "
                "backward on the sum"
            )
