"""``python -m tools.train_model``: train one variant and export it."""

import argparse
import hashlib
import os
import random
import time
from dataclasses import replace
from pathlib import Path

import tokenizers
import torch

from tools.train_model.checkpoint import Run, load_exported, load_run
from tools.train_model.export import export_model
from tools.train_model.init import build_model
from tools.train_model.model import VARIANTS, LanguageModel
from tools.train_model.optimiser import MuonAdamW
from tools.train_model.schedule import CONTINUED, DEEP, FROM_SCRATCH
from tools.train_model.tokenizer import PieceEncoder, train_tokenizer
from tools.train_model.train import Budget, train


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.train_model", description=__doc__)
    parser.add_argument("--variant", choices=sorted(VARIANTS), required=True)
    parser.add_argument("--out", type=Path, help="folder for the exported model (default: in the user's cache)")
    parser.add_argument("--state", type=Path, help="run state (default .train/VARIANT.pt)")
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--minutes", type=float, help="budget of training time; of processor time on one CPU thread")
    length.add_argument("--steps", type=int, help="budget of steps: repeatable exactly")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--resume", action="store_true", help="go on from the run state")
    parser.add_argument("--init", type=Path, help="start from the weights of an exported model")
    parser.add_argument("--muon-rate", type=float, default=0.01)
    parser.add_argument("--adam-rate", type=float, default=3e-3)
    return parser.parse_args(arguments)


def starting_point(
    arguments: argparse.Namespace,
) -> tuple[LanguageModel, tokenizers.Tokenizer]:
    """The model and the tokenizer that training starts from."""
    config = VARIANTS[arguments.variant]
    if arguments.init is not None:
        tokenizer = tokenizers.Tokenizer.from_file(str(arguments.init / "tokenizer.json"))
        return load_exported(arguments.init, config.kv_heads), tokenizer
    tokenizer = train_tokenizer()
    config = replace(config, vocabulary=tokenizer.get_vocab_size())
    return build_model(config, tokenizer.get_vocab(), arguments.seed), tokenizer


def cached(variant: str) -> Path:
    """The folder of a model that is made where it is needed, and kept."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "thermocline" / "models" / variant


def describe(folder: Path) -> str:
    """What results say of a model, to tell it from others."""
    return f"{folder}, weights of SHA-256 {hashlib.sha256((folder / 'model.safetensors').read_bytes()).hexdigest()}"


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    if options.out is None:
        options.out = cached(options.variant)
        if (options.out / "model.safetensors").exists() and not options.resume:
            print(f"made before: {describe(options.out)}")
            return
    torch.set_num_threads(options.threads)
    model, tokenizer = starting_point(options)
    model.to(options.device)
    run = Run(
        model=model,
        optimiser=MuonAdamW(model, options.muon_rate, options.adam_rate),
        rng=random.Random(options.seed + 100),
        generator=torch.Generator().manual_seed(options.seed),
    )
    state_path = options.state or Path(".train") / f"{options.variant}.pt"
    if options.resume:
        load_run(run, state_path)
    schedule = CONTINUED if options.init is not None else DEEP if model.config.layers > 4 else FROM_SCRATCH
    budget = Budget(steps=options.steps, minutes=options.minutes)
    # Other work on the machine does not shorten a run then.
    clock = time.process_time if options.device == "cpu" and options.threads == 1 else time.monotonic
    train(run, schedule, PieceEncoder(tokenizer), budget, state_path, clock=clock)
    export_model(model, tokenizer, options.out)
    print(f"{run.step} steps, {run.tokens} tokens, {run.elapsed_s / 60:.1f} minutes: {describe(options.out)}")


if __name__ == "__main__":
    main()
