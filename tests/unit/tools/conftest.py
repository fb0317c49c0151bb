"""What the recipe's tests share: the tokenizer, trained once, and one thread for torch."""

from collections.abc import Iterator

import pytest
import torch

from tools.train_model.tokenizer import PieceEncoder, train_tokenizer


@pytest.fixture(scope="session")
def encoder() -> PieceEncoder:
    """The recipe's tokenizer, as the trainer uses it."""
    return PieceEncoder(train_tokenizer())


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Run torch on one thread, so that sums have one order, and put the number back."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
