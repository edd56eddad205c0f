"""What a parameter is while it is sharded: this rank's slice of a flat buffer, and what stands in the user's hands."""
