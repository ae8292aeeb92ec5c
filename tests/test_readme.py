"""Every code block of the README runs."""

import re
import shlex
from pathlib import Path

from attn_bounds.cli import main

README = (Path(__file__).parents[1] / "README.md").read_text()


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
