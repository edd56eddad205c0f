"""Parts that can be deleted: the rest of the package works without each of them. ``registry.py`` names them."""
