"""Gradients: collected in buckets, reduced in one order, and shown to user code and optimizers."""
