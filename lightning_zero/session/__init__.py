"""One sharded run without a Trainer: from set-up to its last checkpoint, for strategies and loops of one's own."""
