"""Random user actions at random hooks of random small models, each program compared with DDP.

``models`` builds what is trained, ``vocabulary`` holds what users do (the actions stand in ``reads``, ``writes``,
``gradients``, ``groups`` and ``modules``), ``programs`` draws programs, ``play`` trains one under one strategy,
``worlds`` plays many and survives hangs, ``oracle`` compares, ``__main__`` reports:
``python -m tests.thorough.fuzz --programs 500 --seed 0``.
"""
