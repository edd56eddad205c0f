"""Quantised communication between hosts: ``ZeroStrategy(compression=Compression(...))``."""

from lightning_zero.extensions.compression.collectives import CompressedCollectives, CompressedOverGloo
from lightning_zero.extensions.compression.feedback import load_residuals, saved_residuals

__all__ = ["CompressedCollectives", "CompressedOverGloo", "load_residuals", "saved_residuals"]
