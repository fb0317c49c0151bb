"""``thermocline doctor``: does this machine have what Thermocline needs?

:mod:`facts` looks, :mod:`checks` judges (pure), and the command prints a table.
"""
