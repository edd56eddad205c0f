"""Lightning's side: the strategy and the precision of a Trainer, and what its callbacks and loops must be told."""
