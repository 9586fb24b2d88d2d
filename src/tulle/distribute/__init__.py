"""`distribute`: puts a plan on a model, so that the user's own training loop trains it on all ranks of a mesh."""

from tulle.distribute.choosing import make_plan
from tulle.distribute.putting import CHECK_FINITE, OBSERVE_EVERY, distribute

__all__ = ["CHECK_FINITE", "OBSERVE_EVERY", "distribute", "make_plan"]
