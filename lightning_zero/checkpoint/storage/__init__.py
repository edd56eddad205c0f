"""Where the bytes of a checkpoint are: folders that are read in parts, and names that appear in one step."""
