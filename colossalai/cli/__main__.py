"""``python -m colossalai.cli``: the same as the console script, where that is not on the PATH."""

from .cli import cli

if __name__ == "__main__":
    cli(prog_name="colossalai")
