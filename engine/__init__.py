"""What assembles and runs recipes. Names for plugins are in `trainer.plugins`."""

from .core.moved import support_old_names

support_old_names()
