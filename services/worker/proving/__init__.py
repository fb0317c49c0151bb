"""Proofs of what a worker uses of CUDA, on the device that it has, before it serves.

Code that has never run on a card may be wrong there, or not run at all. So every part of a worker that rests on CUDA
(:class:`~services.worker.proving.part.Part`) has ways to be done, best first, and each way a proof: a small computation
that is compared with an oracle. The first way that passes serves. What failed, and why, is told like every shortfall.

Proofs run in a process of their own (:mod:`process`, :mod:`child`). A kernel that reads a wrong address leaves the CUDA
context of its process broken for good (``shared.memory.cuda_runtime.STICKY``), and one that never ends cannot be called
off: a worker that tried such a way itself would be lost with its model. The child is killed in their place and another
one goes on with the next way. It costs an import of torch and a context, some seconds, once; what Triton compiles there
is in its cache when the worker compiles the same. The limits are in :mod:`choosing`, which has no CUDA in it.

To add a part, or a way, write its proof in a module here and one entry in :mod:`parts`. Ask for the way that serves
where the part is made: ``proofs.way("name")``.
"""
