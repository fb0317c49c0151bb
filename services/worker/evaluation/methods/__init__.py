"""Methods to choose which tokens of a prefix are kept, one a file."""

from services.worker.evaluation.methods.full import Full
from services.worker.evaluation.methods.registry import METHODS, Method, MethodSettings

__all__ = ["METHODS", "Full", "Method", "MethodSettings"]
