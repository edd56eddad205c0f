"""Checkpoints: the format, the record, publishing, and what is made of damaged ones."""
