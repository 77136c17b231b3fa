"""What assembles and runs recipes. Names for plugins are in `trainer.plugins`."""

from .core.plugin_modules import support_old_names

support_old_names()
