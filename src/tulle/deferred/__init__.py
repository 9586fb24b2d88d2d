"""Models that are built without memory, and get their values where, and as far as, they are wanted."""

from tulle.deferred.materialize import deferred_init, give, is_deferred, materialize

__all__ = ["deferred_init", "give", "is_deferred", "materialize"]
