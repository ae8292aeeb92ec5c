"""Run the unmodified alpha-beta-CROWN of a checkout on one instance, and re-check its verdict with an attack."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from attn_bounds.errors import ArgumentError

from .attack import find_counterexample
from .config import Instance
from .incomplete import Verdict
from .onnx_route import input_shape, load_onnx, onnx_to_torch
from .vnnlib_reader import read_vnnlib

_WORDS = {"unsat": "unsat", "sat": "sat", "timeout": "timeout", "unknown": "unknown", "error": "error"}


def check_checkout(path: str | Path) -> Path:
    """The checkout's folder, if it has the verifier in it."""
    if not Path(path, "complete_verifier", "abcrown.py").is_file():
        raise ArgumentError(f"abcrown: expected a checkout with complete_verifier/abcrown.py, got {path}")
    return Path(path)


def run_checkout(checkout: Path, config: Path, instance: Instance, log: Path | None = None) -> Verdict:
    """Verdict of the checkout's verifier; `unsat` is withdrawn if an attack finds a violated point.

    `method` keeps the verifier's own word; what it printed goes to the file `log`.
    """
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.txt")
        command = [sys.executable, "-m", "attn_bounds_abcrown.launch", str(checkout.resolve())]
        command += ["--config", str(config.resolve()), "--onnx_path", str(instance.onnx.resolve())]
        command += ["--vnnlib_path", str(instance.vnnlib.resolve()), "--timeout", str(instance.timeout)]
        command += ["--results_file", str(result)]
        if not torch.cuda.is_available():  # the verifier's default is a GPU
            command += ["--device", "cpu"]
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                env={**os.environ, "PYTHONPATH": import_path()},
                capture_output=True,
                text=True,
                timeout=2 * instance.timeout + 120,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Verdict("timeout", seconds=time.monotonic() - start, method="alpha-beta-CROWN: stopped from outside")
        if log is not None:
            log.write_text(done.stdout + done.stderr)
        word = _word(result) if done.returncode == 0 else "error"
    verdict = Verdict(word, method=f"alpha-beta-CROWN: {word}")
    if word == "error":
        verdict.method += f" ({_last_line(done.stderr) or 'no result written'})"
    if word in ("sat", "unsat"):
        model, prop = load_onnx(instance.onnx), read_vnnlib(instance.vnnlib)
        verdict.counterexample = find_counterexample(onnx_to_torch(model), model, prop, input_shape(model))
        if verdict.counterexample is not None:
            verdict.word = "sat"
        elif word == "sat":
            verdict.word = "unknown"
            verdict.method += "; no point re-checked in onnxruntime"
    verdict.seconds = time.monotonic() - start
    return verdict


def import_path() -> str:
    """This process's import path, absolute, as PYTHONPATH of one that runs in another folder."""
    return os.pathsep.join(str(Path(entry or ".").resolve()) for entry in sys.path)


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else ""


def _word(path: Path) -> str:
    """The verdict in a results file, the first known word of its first line."""
    if not path.exists():
        return "error"
    words = path.read_text().split()
    return next((_WORDS[word] for word in words[:1] if word in _WORDS), "error")
