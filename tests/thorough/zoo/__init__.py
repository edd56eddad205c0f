"""Architectures that nobody here wrote, trained under DDP and in every stage."""
