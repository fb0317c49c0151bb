"""``thermocline doctor``: does this machine have what Thermocline needs?

:mod:`facts` looks, :mod:`checks` judges (pure), and the command prints a table. With ``--profile`` it measures how fast
pages move here (:mod:`profile`, :mod:`disk_speed`) and writes that down for workers. With ``--gpu`` it proves what a
worker uses of CUDA (:mod:`gpu`).
"""
