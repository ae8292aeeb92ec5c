"""The command `attn-bounds`: each subcommand is a module with `add_parser(subparsers)` and `run(args) -> int`."""
