"""The user's optimizers on shards."""
