"""Policies and schedules that a cell can be told to use: ours, HotPrefix's and those of the literature.

Every module here is imported with the package and registers what it defines, so that one more is one more file.
Programs that fold import it; the core does not.
"""

from importlib import import_module
from pkgutil import walk_packages

for _name in sorted(module.name for module in walk_packages(__path__, f"{__name__}.")):
    import_module(_name)
