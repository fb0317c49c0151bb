"""``thermocline doctor``: whether this machine has what Thermocline needs.

:mod:`facts` gathers, :mod:`checks` judges (pure), and the command prints a table. With ``--profile`` it measures how
fast pages move here (:mod:`profile`, :mod:`disk_speed`) and writes a profile for workers. With ``--gpu`` it proves the
ways in which a worker uses CUDA (:mod:`gpu`).
"""
