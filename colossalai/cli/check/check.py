import click


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("-i", "--installation", is_flag=True, help="Report versions, native extensions and whether they fit together.")
def check(installation: bool) -> None:
    """Look at the installation."""
    if not installation:
        click.echo("No option is given; -i reports on the installation")
        return
    from .installation import installation_report

    click.echo(installation_report())
