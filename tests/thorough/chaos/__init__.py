"""Chaos: faults of every kind, thrown into a training as users write it, and what has become of it."""
