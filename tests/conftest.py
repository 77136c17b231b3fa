import os
import signal

# Two workers on two cores: more threads only wait for each other. Children inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Under nohup, or in the background of a script, these are ignored, by children too.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
