"""Gradient clipping by the norm of all gradients, wherever they lie."""

from tulle.clip.norm import clip_grad_norm_
from tulle.clip.proxy import Proxied, ProxyGradient
from tulle.clip.proxy_parameter import ProxyParameter
from tulle.spread import Spread, spread_of, spread_over

__all__ = ["Proxied", "ProxyGradient", "ProxyParameter", "Spread", "clip_grad_norm_", "spread_of", "spread_over"]
