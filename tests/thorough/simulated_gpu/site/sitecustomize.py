"""Found by every Python program that ``python -m tests.thorough.simulated_gpu`` starts."""

import ctypes
import os

if "SIMULATED_GPU" in os.environ:
    # Before torch asks what devices there are, which it does once.
    ctypes.CDLL(os.path.join(os.environ["SIMULATED_GPU"], "device.so"), mode=ctypes.RTLD_GLOBAL)
    from tests.thorough.simulated_gpu import cuda

    cuda.install()
