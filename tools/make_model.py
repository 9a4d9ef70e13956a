"""Write a Hugging Face checkpoint folder: random weights in a named shape, or djinn-tiny, trained.

$ python tools/make_model.py random llama-2-13b /models/llama-2-13b --device cuda
$ python tools/make_model.py random mixtral-8x7b /tmp/small-mixtral --reduced --dtype fp32
$ python tools/make_model.py tiny djinnd/models/djinn-tiny --device cuda --seconds 180
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a file, `tools` is not yet importable

import torch

from tools.checkpoints.corpus import standard_library
from tools.checkpoints.random_models.coded import FORMS
from tools.checkpoints.random_models.model import DTYPES, make_random
from tools.checkpoints.shapes.named import SHAPES
from tools.checkpoints.tiny.model import make_tiny


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0: written; 1: could not be written; 2: the command line is wrong."""
    options = _parser().parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("make_model: torch sees no CUDA device here; use --device cpu", file=sys.stderr)
        return 1
    try:
        options.make(options)
    except (ValueError, OSError) as error:
        print(f"make_model: {error}", file=sys.stderr)
        return 1
    return 0


def _random(options: argparse.Namespace) -> None:
    make_random(
        options.shape,
        options.out,
        dtype=DTYPES[options.dtype],
        seed=options.seed,
        device=options.device,
        shard_bytes=int(options.shard_gb * 1e9),
        reduced=options.reduced,
        blocks=options.blocks,
        form=options.form,
    )


def _tiny(options: argparse.Namespace) -> None:
    seconds = 180.0 if options.seconds is None and options.steps is None else options.seconds
    make_tiny(
        options.out, standard_library(), device=options.device, seconds=seconds, steps=options.steps, seed=options.seed
    )


def _parser() -> argparse.ArgumentParser:
    description, examples = (__doc__ or "").split("\n\n", 1)
    parser = argparse.ArgumentParser(
        prog="make_model.py",
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    random = commands.add_parser("random", help="random weights in the shape of a known model")
    random.set_defaults(make=_random)
    random.add_argument("shape", choices=tuple(SHAPES), metavar="SHAPE", help=", ".join(SHAPES))
    _add_common(random)
    random.add_argument("--dtype", choices=tuple(DTYPES), default="bf16", help="of the weights (default: bf16)")
    random.add_argument("--form", choices=tuple(FORMS), help="codes of a quantised checkpoint")
    random.add_argument("--shard-gb", type=_positive, default=5.0, help="largest weight file, in GB (default: 5)")
    random.add_argument("--reduced", action="store_true", help="the same family, small enough for tests")
    random.add_argument("--blocks", type=int, help="this many blocks instead of the shape's")

    tiny = commands.add_parser("tiny", help="train djinn-tiny on Python's standard library")
    tiny.set_defaults(make=_tiny)
    _add_common(tiny)
    length = tiny.add_mutually_exclusive_group()
    length.add_argument("--seconds", type=_positive, help="train for this long (default: 180)")
    length.add_argument("--steps", type=int, help="train for this many steps, to repeat a run")
    return parser


def _add_common(command: argparse.ArgumentParser) -> None:
    command.add_argument("out", type=Path, metavar="OUT", help="the folder to write")
    command.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="what computes (default: cpu)")
    command.add_argument("--seed", type=int, default=0, help="default: 0")


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above zero")
    return value


if __name__ == "__main__":
    sys.exit(main())
