"""Reading what Slurm says about a job."""

import re
from collections.abc import Mapping

from .errors import ConfigError

_FIRST_PORT, _PORTS = 20000, 20000


def _parts(nodes: str) -> list[str]:
    """Split at the commas that are not inside brackets."""
    return re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodes)


def _expand(part: str) -> list[str]:
    found = re.match(r"([^\[]*)\[([^\]]*)\](.*)", part)
    if found is None:
        return [part]
    head, ranges, tail = found.groups()
    names: list[str] = []
    for item in ranges.split(","):
        low, _, high = item.partition("-")
        if not low.isdigit() or (high and not high.isdigit()):
            raise ConfigError(f"the Slurm node list {part!r} has a range {item!r} that is not like 01-04")
        numbers = range(int(low), int(high or low) + 1)
        names += [f"{head}{number:0{len(low)}d}{rest}" for number in numbers for rest in _expand(tail)]
    return names


def slurm_hosts(nodes: str) -> list[str]:
    """The host names of a Slurm node list: ``n[01-02,07],m3`` is n01, n02, n07, m3.

    Widths are kept, several brackets in one name are multiplied. Raises ConfigError if it cannot be read.
    """
    parts = _parts(nodes.strip())
    hosts = [host for part in parts for host in _expand(part.strip())]
    if not hosts or ",".join(parts) != nodes.strip() or any("[" in host or "]" in host for host in hosts):
        raise ConfigError(f"cannot read the Slurm node list {nodes!r}; it should be like n[01-04],m1")
    return hosts


def slurm_port(environ: Mapping[str, str]) -> int:
    """A port all tasks of a job step agree on without talking: 20000 to 39999, from the numbers of job and step."""
    job, step = environ.get("SLURM_JOB_ID", environ.get("SLURM_JOBID", "")), environ.get("SLURM_STEP_ID", "")
    # Batch and interactive steps have numbers far above any port; the remainder brings them back.
    number = (int(job) if job.isdigit() else 9500) + (int(step) if step.isdigit() else 0)
    return _FIRST_PORT + number % _PORTS
