"""Quantised communication between hosts: ``ZeroStrategy(compression=Compression(...))``."""

from lightning_zero.extensions.compression.collectives import CompressedCollectives, CompressedOverGloo

__all__ = ["CompressedCollectives", "CompressedOverGloo"]
