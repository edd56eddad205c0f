"""Ranks of one host exchange by reading one another's memory: a leaf that only ``native`` knows."""
