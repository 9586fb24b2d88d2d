"""`distribute`: puts a plan on a model, so that the user's own training loop trains it on all ranks of a mesh."""

from tulle.distribute.adopted import is_distributed, mesh_of
from tulle.distribute.choosing import ANEW, MAKE_ANEW, make_plan
from tulle.distribute.putting import CHECK_FINITE, OBSERVE_EVERY, distribute

__all__ = ["ANEW", "CHECK_FINITE", "MAKE_ANEW", "OBSERVE_EVERY", "distribute", "is_distributed", "make_plan", "mesh_of"]
