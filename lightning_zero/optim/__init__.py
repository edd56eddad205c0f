"""The user's optimizers on shards: the same objects, with this rank's part of each parameter in their groups during a
step, bit for bit what they do on whole parameters.
"""
