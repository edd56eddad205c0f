"""Races between streams, looked for where there are none: see ``trace.py`` and ``simulated.py``."""
