"""Where the process of a command begins. It imports next to nothing, to be there at once."""

import gc
import os
import signal
import sys

ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""the variables from which torch 2.11 to 2.13 reads the settings of the GPU allocator"""


def main() -> None:
    """Run the command line.

    The signals that stop a run wait until it can answer them, some tenths of a second later; see
    `StopFlag`. Other commands answer as Python does.
    """
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    is_run = "run" in sys.argv[1:3]  # also `trainer --traceback run`
    signal.pthread_sigmask(signal.SIG_BLOCK if is_run else signal.SIG_UNBLOCK, numbers)
    # Segments that grow lose less memory to fragmentation. Torch reads this when it is imported,
    # and ranks inherit it.
    if not any(name in os.environ for name in ALLOCATOR_SETTINGS):
        os.environ[ALLOCATOR_SETTINGS[0]] = "expandable_segments:True"
    # Nearly all that is made while modules load is kept: looking for cycles in it is in vain.
    gc.set_threshold(100_000)
    from .main import main as run_command

    run_command()
