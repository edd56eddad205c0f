"""Units at run time: what of their parameters is in memory, which are whole when, and who may read them."""
