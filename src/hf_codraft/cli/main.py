"""`hf-codraft`: demo, grpo, warmup."""

import sys

COMMANDS = {
    "demo": ("hf_codraft.cli.demo", "train a 135M model and its draft together on this machine, and draw the result"),
    "grpo": ("hf_codraft.cli.grpo", "train your own model: TRL's `trl grpo` with a draft (--config FILE.yaml)"),
    "warmup": ("hf_codraft.cli.warmup", "only start a draft on the policy's rollouts, and save it"),
}


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: hf-codraft COMMAND [options]\n")
        for name, (_, text) in COMMANDS.items():
            print(f"  {name:8s} {text}")
        print("\nhf-codraft COMMAND --help lists the options of one.")
        return 0
    if argv[0] not in COMMANDS:
        print(f"hf-codraft: no command {argv[0]!r}; there are {', '.join(COMMANDS)}.", file=sys.stderr)
        return 2
    from importlib import import_module

    return import_module(COMMANDS[argv[0]][0]).run(argv[1:]) or 0


if __name__ == "__main__":
    sys.exit(main())
