"""Policies and schedules of the literature, to compare with. Whoever folds imports this package; the core does not.

Every module here is imported with it and registers what it defines, so that one more is one more file.
"""

from importlib import import_module
from pkgutil import iter_modules

for _name in sorted(module.name for module in iter_modules(__path__)):
    import_module(f"{__name__}.{_name}")
