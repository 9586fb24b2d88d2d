"""Adapters for frameworks that have a training loop of their own; each module needs its extra."""
