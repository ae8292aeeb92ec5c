"""Read the part of an alpha-beta-CROWN yaml that the incomplete verifier uses; its other keys are left alone."""

from __future__ import annotations

import csv
import math
import re
from dataclasses import dataclass
from pathlib import Path

from attn_bounds.errors import ArgumentError, MissingDependencyError, ModelLoadError

from .incomplete import Settings

_HOOK = re.compile(r"""Customized\(\s*["']attn_bounds_abcrown["']\s*,\s*["'](\w+)["']""")


@dataclass(frozen=True)
class Instance:
    """One network, one property, and the seconds it may take."""

    onnx: Path
    vnnlib: Path
    timeout: float


def read_config(path: str | Path) -> dict:
    """The yaml as nested dictionaries; a malformed file is one line of error."""
    try:
        import yaml
    except ImportError as error:
        raise MissingDependencyError("pyyaml: not installed; pip install 'attn-bounds[verify]'") from error
    try:
        config = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise ModelLoadError(f"config: cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ArgumentError(f"config: {path} is not valid yaml: {' '.join(str(error).split())}") from error
    if not isinstance(config, dict) or not all(isinstance(part, dict) for part in config.values()):
        raise ArgumentError(f"config: {path}: expected sections (general, model, ...) of key: value lines")
    return config


def settings_from(config: dict) -> Settings:
    """Settings of the incomplete verifier from a config: which operators, how many steps, which precision."""
    general, attack = config.get("general", {}), config.get("attack", {})
    hook = str(general.get("graph_optimizer", ""))
    named = _HOOK.search(hook)
    graph = named[1] if named else "stock"
    if graph not in ("fuse_attention", "repair_softmax", "stock"):
        raise ArgumentError(f"general.graph_optimizer: expected fuse_attention or repair_softmax, got {graph}")
    default = Settings()
    return Settings(
        graph=graph,
        # the hook's 0 leaves the steps to the verifier, which is not here
        rows_iterations=_option(hook, "rows_iterations") or default.rows_iterations,
        iterations=_option(hook, "iterations") or default.iterations,
        leaves=0 if general.get("complete_verifier") == "skip" else default.leaves,
        restarts=_positive(attack, "pgd_restarts", default.restarts),
        steps=_positive(attack, "pgd_steps", default.steps),
        double=bool(general.get("double_fp", False)),
    )


def _option(hook: str, name: str) -> int:
    match = re.search(rf"[(,\s]{name}\s*=\s*(\d+)", hook)
    return int(match[1]) if match else 0


def _positive(section: dict, name: str, default: int) -> int:
    value = section.get(name, default)
    if not isinstance(value, int) or value < 1:
        raise ArgumentError(f"attack.{name}: expected a positive whole number, got {value!r}")
    return value


def instances_from(config: dict, base: Path, onnx=None, vnnlib=None, table=None, timeout=None) -> list[Instance]:
    """The instances to verify: a pair of files, or a csv of `onnx,vnnlib,timeout` lines; options win over the yaml."""
    general = config.get("general", {})
    root = base / str(general.get("root_path") or ".")
    onnx = onnx or _under(root, config.get("model", {}).get("onnx_path"))
    vnnlib = vnnlib or _under(root, config.get("specification", {}).get("vnnlib_path"))
    limit = float(timeout if timeout is not None else config.get("bab", {}).get("timeout", 60))
    if not math.isfinite(limit) or limit <= 0:
        raise ArgumentError(f"timeout: expected seconds > 0, got {limit}")
    if onnx and vnnlib and not table:
        found = [Instance(Path(onnx), Path(vnnlib), limit)]
    else:
        table = table or _under(root, general.get("csv_name"))
        if not table:
            raise ArgumentError("instances: give --onnx and --vnnlib, or --csv, or name them in the config")
        found = _read_table(Path(table), timeout)
    for instance in found:
        for path in (instance.onnx, instance.vnnlib):
            if not path.is_file():
                raise ModelLoadError(f"instances: no file {path}")
    return found


def _under(root: Path, name) -> Path | None:
    return root / str(name) if name else None


def _read_table(path: Path, timeout) -> list[Instance]:
    try:
        with path.open(newline="") as file:
            rows = [row for row in csv.reader(file) if row]
    except OSError as error:
        raise ModelLoadError(f"csv: cannot read {path}: {error.strerror}") from error
    found = []
    for number, row in enumerate(rows, 1):
        try:
            onnx, vnnlib, seconds = (cell.strip() for cell in row)
            found.append(
                Instance(path.parent / onnx, path.parent / vnnlib, float(seconds if timeout is None else timeout))
            )
        except ValueError:
            raise ArgumentError(
                f"csv: {path} line {number}: expected onnx,vnnlib,timeout, got {','.join(row)}"
            ) from None
    if not found:
        raise ArgumentError(f"csv: {path} has no lines")
    return found
