"""Models that are built without memory, and get their values where, and as far as, they are wanted."""

from tulle.deferred.give import give, give_states, swappable
from tulle.deferred.materialize import deferred_init, is_deferred, materialize, values_of

__all__ = ["deferred_init", "give", "give_states", "is_deferred", "materialize", "swappable", "values_of"]
