"""Run configs inside an unmodified alpha-beta-CROWN over the instances of a csv, and compare what each verifies.

    python comparisons/checkout.py path/to/alpha-beta-CROWN --csv vit/instances.csv --timeout 60 --out runs
        --configs verify_configs/vit_repaired.yaml verify_configs/vit.yaml

The words are the verifier's own: nothing is attacked or checked afterwards. Seconds are the verifier's, without the
start of its process; with `--processor-time` they and the timeouts count processor time, so that a busy machine does
not matter. A stopped run continues; an instance that crashes the verifier is an error, and the run goes on behind it.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import torch
from attn_bounds_abcrown.checkout import check_checkout, import_path
from attn_bounds_abcrown.incomplete import Verdict
from attn_bounds_abcrown.results import write_result

_NUMBERS = r"\(first 10 items\): \[(.*?)\]"


def run(checkout: Path, config: Path, args, log: Path) -> None:
    """One process of the verifier for the instances that the log does not hold yet; again after a crash."""
    count = len(args.csv.read_text().splitlines())
    while len(read_log(log)) < count:
        start = len(read_log(log))
        command = [sys.executable, "-m", "attn_bounds_abcrown.launch", str(checkout.resolve())]
        command += ["--config", str(config.resolve()), "--root_path", str(args.csv.resolve().parent)]
        command += ["--csv_name", args.csv.name, "--start", str(start), "--results_file", str(log.with_suffix(".pkl"))]
        command += ["--override_timeout", str(args.timeout)]
        if not torch.cuda.is_available():
            command += ["--device", "cpu"]
        path = import_path()
        if args.processor_time:
            path = os.pathsep.join([str(Path(__file__).resolve().parent / "processor_clock"), path])
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        with log.open("a") as file:
            done = subprocess.run(
                command, env=environment, cwd=args.out, stdout=file, stderr=subprocess.STDOUT, check=False
            )
            if done.returncode and len(read_log(log)) <= start + 1:
                print(f"Result: error {done.returncode}", file=file)


def read_log(log: Path) -> dict[str, Verdict]:
    """The finished instances of a log, by the name of their VNN-LIB file."""
    found = {}
    for text in log.read_text().split("vnnlib ID: ")[1:] if log.exists() else []:
        verdict, name = _verdict(text), re.search(r"^Using vnnlib (.*)$", text, re.MULTILINE)
        if verdict is not None and name is not None:
            found[Path(name[1]).name.split(".")[0]] = verdict
    return found


def _verdict(text: str) -> Verdict | None:
    result = re.search(r"^Result: (\S+)(?: .*?in ([\d.]+) seconds)?", text, re.MULTILINE)
    if result is None:
        error = re.findall(r"^(\w*Error.*)$", text, re.MULTILINE)
        return Verdict("error", method=error[-1]) if error else None
    method = result[1]
    word = "unsat" if method.startswith("safe") else "sat" if method.startswith("unsafe") else "unknown"
    verdict = Verdict("error" if method == "error" else word, seconds=float(result[2] or "nan"), method=method)
    for name, field in (("initial CROWN bounds", "margin_crown"), ("initial alpha-crown bounds", "margin_alpha")):
        bounds = re.search(name + " " + _NUMBERS, text)
        if bounds is not None:
            setattr(verdict, field, min(map(float, bounds[1].split(","))))
    return verdict


def table(verdicts: dict[str, dict[str, Verdict]]) -> pd.DataFrame:
    """One line an instance that every config has run, word and seconds of each."""
    names = [name for name in next(iter(verdicts.values())) if all(name in found for found in verdicts.values())]
    columns = {}
    for config, found in verdicts.items():
        columns[config] = [found[name].word for name in names]
        columns[f"{config}_s"] = [round(found[name].seconds, 1) for name in names]
    return pd.DataFrame(columns, index=names)


def main() -> None:
    """Run, print the table and what each config verifies beyond the others."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--configs", type=Path, nargs="+", required=True)
    parser.add_argument("--timeout", type=float, default=60)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--processor-time", action="store_true")
    parser.add_argument("--read-only", action="store_true", help="only read the logs of earlier runs")
    args = parser.parse_args()
    checkout = check_checkout(args.checkout)
    verdicts = {}
    for config in args.configs:
        folder = args.out / config.stem
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / "verifier.log"
        if not args.read_only:
            run(checkout, config, args, log)
        verdicts[config.stem] = read_log(log)
        for name, verdict in verdicts[config.stem].items():
            write_result(folder, name, verdict)
    lines = table(verdicts)
    print(lines.to_string())
    verified = {config: set(lines.index[lines[config] == "unsat"]) for config in verdicts}
    for key, found in verified.items():
        print(f"{key}: verifies {len(found)} of {len(lines)}", end="")
        print("".join(f", {len(found - other)} not by {name}" for name, other in verified.items() if name != key))


if __name__ == "__main__":
    main()
