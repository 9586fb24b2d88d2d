"""Gradient clipping by the norm of all gradients, wherever they lie."""

from tulle.clip.bearer import Bearer, Burden
from tulle.clip.norm import clip_grad_norm_
from tulle.clip.spokesman import Spokesman
from tulle.clip.spread import Spread, spread_of, spread_over

__all__ = ["Bearer", "Burden", "Spokesman", "Spread", "clip_grad_norm_", "spread_of", "spread_over"]
