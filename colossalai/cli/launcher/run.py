import os
from typing import Any

import click

from colossalai.utils.errors import ConfigError

from .agents import Command, Outcome, report, run_agents
from .command import Job, agent_command, check_port, choose_master, free_port, parse_extra, remote_command, resolve_auto
from .hosts import select_hosts


class _UntilProgram(click.Command):
    """Splits the command line where the program begins: what follows belongs to the program and is not looked at.

    Our options end at the first word that is none of them: the script or, after ``-m``, the module's first own argument
    ("--" ends them there, too, for a module with an option called like one of ours).
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        takes_value = {name: not p.is_flag for p in self.get_params(ctx) if isinstance(p, click.Option) for name in p.opts}
        at, module = 0, False
        while at < len(args):
            name, equals, _ = args[at].partition("=")
            if args[at] == "--" or name not in takes_value:
                break
            module |= name == "-m"
            at += 1 if equals or not takes_value[name] else 2
        own, rest = args[:at], args[at:]
        if rest and rest[0] == "--":
            rest = rest[1:]
        elif rest and rest[0].startswith("-") and not module:
            raise click.NoSuchOption(rest[0], ctx=ctx, possibilities=_similar(rest[0], takes_value))
        return super().parse_args(ctx, [*own, "--", *rest])


def _similar(given: str, known: Any) -> list[str]:
    import difflib

    return difflib.get_close_matches(given.partition("=")[0], known)


@click.command(
    cls=_UntilProgram,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    options_metavar="[OPTIONS]",
    epilog="Everything after the script (or, with -m, from the first word that is no option above) goes to the program unchanged.",
)
@click.option("-H", "-host", "--host", default=None, help="Hosts, separated by commas. Without it and --hostfile: this machine.")
@click.option("--hostfile", default=None, help="File with one 'HOST' or 'HOST slots=N' a line; '#' starts a comment.")
@click.option("--include", default=None, help="Hosts of the hostfile to use, separated by commas. Not with --exclude.")
@click.option("--exclude", default=None, help="Hosts of the hostfile to leave out, separated by commas. Not with --include.")
@click.option("--num_nodes", "--num-nodes", type=int, default=-1, help="Use only the first N hosts.")
@click.option(
    "--nproc_per_node",
    "--nproc-per-node",
    default=None,
    help="Processes on each host: a number; gpu or cpu, one for each; auto, one per GPU of this machine, else two. "
    "May be left out if the hostfile gives slots.",
)
@click.option(
    "--master_port",
    "--master-port",
    type=click.IntRange(0, 65535),
    default=29500,
    show_default=True,
    help="Port where the processes meet; 0 takes a free one (jobs on this machine only).",
)
@click.option("--master_addr", "--master-addr", default=None, help="Address where the processes meet. [default: the first host]")
@click.option(
    "--rdzv_timeout",
    "--rdzv-timeout",
    type=click.IntRange(1),
    default=45,
    show_default=True,
    help="Seconds the hosts may take to meet before the job fails.",
)
@click.option(
    "--extra_launch_args",
    "--extra-launch-args",
    default=None,
    help="Options for torch's launcher: 'a=1,b=2,standalone'.",
)
@click.option("--ssh-port", "--ssh_port", type=click.IntRange(1, 65535), default=None, help="Port of the hosts' ssh servers.")
@click.option("--forward_env", "--forward-env", default=None, help="More variables for remote hosts, names separated by commas.")
@click.option("-m", "module", default=None, help="Run this module instead of a script.")
@click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT.py [ARGS]...")
@click.pass_context
def run(ctx: click.Context, **options: Any) -> None:
    """Start a training job: SCRIPT.py runs in several processes on this machine, or on several machines over ssh.

    \b
      colossalai run --nproc_per_node 8 train.py --lr 1e-4
      colossalai run --hostfile hosts.txt --nproc_per_node 8 train.py

    Each process finds RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set; colossalai.launch_from_torch() reads them.
    The exit status is 0 if all processes ended well, else 1 (128 + N after signal N).
    """
    try:
        job, variables = make_job(options)
        outcomes, signum = start(job, variables)
    except ConfigError as error:
        raise click.ClickException(str(error)) from error
    code = report(outcomes)
    if any(outcome.rendezvous_failed for outcome in outcomes):
        click.echo(f"Error: {_not_met(job)}", err=True)
    ctx.exit(code if signum is None else 128 + signum)


def make_job(options: dict[str, Any]) -> tuple[Job, dict[str, str]]:
    """The job that the command line describes, and variables to set for it. ConfigError names the wrong option."""
    chosen = {name: options[name] for name in ("host", "hostfile", "include", "exclude", "num_nodes")}
    hosts = select_hosts(**chosen)
    program, args, module = _program(options["program"], options["module"])
    nproc, variables = options["nproc_per_node"], {}
    if nproc is not None:
        nproc, variables = resolve_auto(nproc, hosts, _device_count() if nproc == "auto" else 0)
    extra = parse_extra(options["extra_launch_args"])
    if nproc is None and "nproc_per_node" in extra:
        nproc = extra["nproc_per_node"]
    port = options["master_port"]
    if port == 0:
        if not all(host.local for host in hosts):
            raise ConfigError("--master_port 0 takes a free port of this machine; for remote hosts give a number")
        port = free_port()
    forward = tuple(name.strip() for name in (options["forward_env"] or "").split(",") if name.strip())
    job = Job(
        hosts=tuple(hosts),
        program=program,
        args=args,
        module=module,
        nproc=nproc,
        master_addr=choose_master(options["master_addr"] or extra.get("master_addr"), hosts),
        master_port=port,
        rdzv_timeout=options["rdzv_timeout"],
        extra=extra,
        ssh_port=options["ssh_port"],
        forward=forward,
    )
    return job, variables


def _program(words: tuple[str, ...], module: str | None) -> tuple[str, tuple[str, ...], bool]:
    if module is not None:
        if module.endswith(".py"):
            raise ConfigError(f"-m {module}: a module's name has no .py; leave -m out to run a script")
        return module, tuple(words), True
    if not words:
        raise ConfigError("nothing to run: give a script (train.py), or a module with -m")
    script, *args = words
    if not script.endswith(".py"):
        raise ConfigError(f"{script!r} is not a Python script (its name must end in .py); to run a module use -m")
    return script, tuple(args), False


def _device_count() -> int:
    from colossalai.accelerator import get_accelerator

    accelerator = get_accelerator()
    return 0 if accelerator.name == "cpu" else accelerator.device_count()


def start(job: Job, variables: dict[str, str] | None = None) -> tuple[list[Outcome], int | None]:
    """Run the job to its end on all its hosts. ConfigError if it cannot even start."""
    if not job.module and job.hosts[0].local and not os.path.isfile(job.program):
        raise ConfigError(f"the script {job.program} does not exist (looked for in {os.getcwd()})")
    address, port = job.endpoint
    if job.hosts[0].local and port is not None and job.options(0)["node_rank"] == "0":
        check_port(address, port)
    commands = [
        Command(host.name, agent_command(job, rank) if host.local else remote_command(job, rank), remote=not host.local)
        for rank, host in enumerate(job.hosts)
    ]
    env = {**os.environ, **(variables or {})}
    return run_agents(commands, env, watch=job.nnodes != "1")


def _not_met(job: Job) -> str:
    address, port = job.endpoint
    where = address if port is None else f"{address}:{port}"
    limit = f"rdzv_conf={job.extra['rdzv_conf']}" if "rdzv_conf" in job.extra else f"{job.rdzv_timeout} s"
    return (
        f"the {job.nnodes} hosts did not meet at {where} within {limit}. Check that all of them use the same "
        f"--master_addr and --master_port, that each can reach {address} (firewall; GLOO_SOCKET_IFNAME or "
        "NCCL_SOCKET_IFNAME name the network to use), or give them longer with --rdzv_timeout"
    )
