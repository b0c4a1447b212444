import click

from .check import check
from .launcher import run


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Colossal-AI's command line: start a training job, look at the installation."""


cli.add_command(run)
cli.add_command(check)
