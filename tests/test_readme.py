"""Every code block of the README runs; every command and script that any README names is there."""

import re
import shlex
from pathlib import Path

import pytest

from attn_bounds.cli import build_parser, main

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
ALL = sorted(
    path
    for path in ROOT.rglob("README.md")
    if not any(part.startswith(".") or part in ("build", "runs") for part in path.relative_to(ROOT).parts)
)


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.S)


def test_python_blocks_run():
    names: dict = {}
    found = blocks("python")
    assert found
    for block in found:
        exec(compile(block, "README.md", "exec"), names)


def test_commands_run(tmp_path, monkeypatch, minilm, capsys):
    monkeypatch.chdir(tmp_path)
    Path("prompts.txt").write_text("The quick brown fox\nA loose answer is useless\n")
    commands = [
        line for block in blocks("bash") for line in block.strip().splitlines() if line.startswith("attn-bounds")
    ]
    assert commands
    for command in commands:
        assert main(shlex.split(command)[1:]) == 0, command
        assert capsys.readouterr().out


def commands_of(text: str) -> list[str]:
    """Commands on lines of their own or in backticks; those with an ellipsis, or of one word, are prose."""
    own_lines = re.findall(r"^ *(attn-bounds [^\n]*)$", text, flags=re.M)
    inline = [" ".join(found.split()) for found in re.findall(r"`(attn-bounds [^`]*)`", text)]
    return [c for c in own_lines + inline if "..." not in c and " --" in c]


def test_the_readmes_hold_commands():
    assert sum(len(commands_of(path.read_text())) for path in ALL) >= 10


@pytest.mark.parametrize("path", ALL, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_of_every_readme_is_accepted(path, capsys):
    parser, _ = build_parser()
    for command in commands_of(path.read_text()):
        try:
            parser.parse_args(shlex.split(command, comments=True)[1:])
        except SystemExit:
            pytest.fail(f"{command}: {capsys.readouterr().err}")


@pytest.mark.parametrize("path", ALL, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_script_of_every_readme_is_there(path):
    for script in re.findall(r"\b(?:python|sh) ((?:comparisons|plugins|tests)/[\w/]+\.(?:py|sh))", path.read_text()):
        assert (ROOT / script).is_file(), script
