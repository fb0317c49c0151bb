"""Proofs, on a worker's device and before it serves, of what the worker uses of CUDA.

Code that has never run on a card may be wrong there, or not run at all. So every part of a worker that rests on CUDA
(:class:`~services.worker.proving.part.Part`) has ways to be done, best first, and each way a proof: a small computation
that is compared with an oracle. The first way that passes serves. Failed ways and their reasons are reported like every
shortfall.

Proofs run in a process of their own (:mod:`process`, :mod:`child`). A kernel that reads a wrong address breaks the CUDA
context of its process permanently (``shared.memory.cuda_runtime.STICKY``), and one that never ends cannot be cancelled:
a worker that tried such a way itself would be lost with its model. The child is killed in its place and another one
continues with the next way. It costs an import of torch and a context, some seconds, once; kernels that Triton compiles
there are in its cache when the worker compiles the same. The limits are in :mod:`choosing`, which has no CUDA in it.

To add a part, or a way, write its proof in a module here and one entry in :mod:`parts`. Ask for the way that serves
where the part is made: ``proofs.way("name")``.
"""
