"""Policies and schedules that a cell can be told to use: ours, HotPrefix's and those of the literature.

Every module here is imported with the package and registers what it defines, so that one more is one more file.
Programs that fold import it; the core does not.
"""

from importlib import import_module
from pkgutil import iter_modules

for _name in sorted(module.name for module in iter_modules(__path__)):
    import_module(f"{__name__}.{_name}")
