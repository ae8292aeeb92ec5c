"""Argument types and options that several subcommands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import ArgumentError, UnsupportedModelError
from ..models import LoadedModel

IMAGE_FILES = ".png, .jpg, ..., or .npy with the pixel values (channels, size, size) that the model takes"


def numbers(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """An argparse type: numbers separated by commas."""

    def parse(text: str) -> list[Any]:
        try:
            found = [kind(part) for part in text.split(",") if part.strip()]
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected {kind.__name__}s separated by commas, got {text!r}") from None
        if not found:
            raise argparse.ArgumentTypeError(f"expected {kind.__name__}s separated by commas, got {text!r}")
        return found

    return parse


def words(text: str) -> list[str]:
    """An argparse type: words separated by commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


def indices(name: str, text: str, count: int) -> list[int]:
    """`all`, or numbers separated by commas, each in 0..count-1. Raises: ArgumentError."""
    if text == "all":
        return list(range(count))
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise ArgumentError(f"{name}: expected 'all' or numbers separated by commas, got {text!r}") from None
    for i in found:
        if not 0 <= i < count:
            raise ArgumentError(f"{name}: expected 0..{count - 1}, got {i}")
    return found


def read_prompts(path: str) -> list[str]:
    """The non-empty lines of a text file. Raises: ArgumentError."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"prompts: expected a readable text file, got {path!r} ({error})") from None
    prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise ArgumentError(f"prompts: expected at least one line of text in {path!r}, got none")
    return prompts


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add --model and --tokens."""
    parser.add_argument(
        "--model", default="minilm", help="minilm, or a BERT, GPT-2 or ViT by transformers name or folder"
    )
    parser.add_argument("--tokens", type=int, metavar="N", help="keep the prompt's first N tokens")


def add_prompts(parser: argparse.ArgumentParser, images: bool = False) -> None:
    """Add --prompts and --token-ids, and --images where a ViT will do."""
    parser.add_argument("--prompts", metavar="FILE", help="a text file, one prompt a line")
    parser.add_argument(
        "--token-ids", type=numbers(int), action="append", metavar="I,J,...", help="a prompt as token ids; repeatable"
    )
    if images:
        parser.add_argument("--images", nargs="+", metavar="FILE", help=f"for a ViT: {IMAGE_FILES}")


def prompts_of(args: argparse.Namespace, model: LoadedModel, default: list[str] | None = None) -> tuple[Any, ...]:
    """The prompts that were given: texts, tuples of token ids, or image files. Raises: ArgumentError."""
    found = one_source(model, {"--prompts": args.prompts, "--token-ids": args.token_ids,
                               "--images": getattr(args, "images", None)}, default)  # fmt: skip
    if args.prompts is not None:
        found = read_prompts(args.prompts)
    return tuple(prompt if isinstance(prompt, str) else tuple(prompt) for prompt in found)


def one_source(model: LoadedModel, given: dict[str, Any], default: Any = None) -> Any:
    """The value of the one option that was given, or the default; it must be of the kind that the model reads.

    Args: given, option -> value or None; the last one is for images.
    Raises: ArgumentError.
    """
    *texts, image = given
    set_ones = [option for option, value in given.items() if value is not None]
    wanted = [image] if model.reads_images else texts
    fits = f"{model.name!r} reads {'images' if model.reads_images else 'text'}: expected {' or '.join(wanted)}"
    if len(set_ones) > 1:
        raise ArgumentError(f"prompts: {fits}, got both {' and '.join(set_ones)}")
    if not set_ones:
        if default is None or model.reads_images:
            raise ArgumentError(f"prompts: {fits}, got neither" if not model.reads_images else f"prompts: {fits} FILE")
        return default
    if set_ones[0] not in wanted:
        raise ArgumentError(f"prompts: {fits}, got {set_ones[0]}")
    return given[set_ones[0]]


def refuse_images(model: LoadedModel, what: str) -> None:
    """Raises: UnsupportedModelError for a model that reads images."""
    if model.reads_images:
        raise UnsupportedModelError(f"model: {what} needs one that reads text, got {model.name!r} ({model.kind})")
