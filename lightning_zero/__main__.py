"""``python -m lightning_zero``: the same as ``lightning-zero``."""

from lightning_zero.cli import main

if __name__ == "__main__":
    main()
