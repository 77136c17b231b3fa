import os

# Two workers on two cores: more threads only wait for each other. Children inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
