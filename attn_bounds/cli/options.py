"""Argument types and options that several subcommands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import ArgumentError


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
