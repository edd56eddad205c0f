"""Damaged and forged checkpoints of every format, loaded, inspected and verified in bounded children.

``python -m tests.thorough.fuzz.checkpoints`` plays many. A failure is what hangs, ends the process, uses up the memory,
raises anything but a ``CheckpointError``, runs code, or is called whole and is something else than was saved.
"""
