"""Which hosts a job runs on: the host list, the hostfile, and what include, exclude and num_nodes leave of it."""

import os
import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from colossalai.utils.errors import ConfigError

LOOPBACK = frozenset({"localhost", "127.0.0.1", "0.0.0.0", "::1"})
# A name that starts with "-" would be read by ssh as one of its options.
_HOST_NAME = re.compile(r"[A-Za-z0-9_.:@%\[\]][A-Za-z0-9_.:@%\[\]-]*")
_LINE_FORMAT = "a line reads 'HOST' or 'HOST slots=N'; '#' starts a comment"


@dataclass(frozen=True)
class Host:
    """One machine of the job. ``slots`` is how many processes its hostfile line allows, None where it says nothing."""

    name: str
    slots: int | None = None

    @cached_property
    def local(self) -> bool:
        """True if the name means this machine, so that neither ssh nor a network is needed."""
        name = self.name.rpartition("@")[2]
        return name in LOOPBACK or name in (socket.gethostname(), socket.getfqdn()) or _is_own_address(name)


def _is_own_address(name: str) -> bool:
    """A socket can be bound to an address exactly if the address belongs to this machine."""
    try:
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False  # a name only ssh knows (an alias in its config)
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
                return True
        except OSError:
            continue
    return False


def parse_hostfile(path: str | os.PathLike) -> list[Host]:
    """Read a hostfile: one ``HOST`` or ``HOST slots=N`` a line; blank lines and ``#`` comments are skipped.

    Raises:
        ConfigError: the file cannot be read or names no host; a line does not read as above or repeats a host.
            The message names the file and the line.
    """
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--hostfile {path} cannot be read: {error}") from error
    hosts: list[Host] = []
    first_seen: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"{path}, line {number}"
        host = _parse_line(words, where)
        if host.name in first_seen:
            raise ConfigError(
                f"{where}: host {host.name!r} stands already in line {first_seen[host.name]}; "
                "name each host once and give its number of processes as slots=N"
            )
        first_seen[host.name] = number
        hosts.append(host)
    if not hosts:
        raise ConfigError(f"--hostfile {path} names no host; {_LINE_FORMAT}")
    return hosts


def _parse_line(words: Sequence[str], where: str) -> Host:
    name, *rest = words
    _check_name(name, where)
    slots = None
    for word in rest:
        match = re.fullmatch(r"slots=(\d+)", word)
        if match is None or slots is not None:
            raise ConfigError(f"{where}: {word!r} is not understood; {_LINE_FORMAT}")
        slots = int(match[1])
        if slots < 1:
            raise ConfigError(f"{where}: slots={slots}, but a host needs at least 1; to leave it out use --exclude")
    return Host(name, slots)


def _check_name(name: str, where: str) -> None:
    if not _HOST_NAME.fullmatch(name):
        raise ConfigError(f"{where}: {name!r} is not a host name (letters, digits and . _ - : @ only)")


def parse_names(text: str, option: str) -> list[str]:
    """The names of a comma-separated list. ConfigError if one is empty, repeated or no host name."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        _check_name(name, f"{option} {text}")
        if names.count(name) > 1:
            raise ConfigError(f"{option} {text}: host {name!r} is named twice")
    return names


def select_hosts(
    *,
    host: str | None = None,
    hostfile: str | None = None,
    include: str | None = None,
    exclude: str | None = None,
    num_nodes: int = -1,
) -> list[Host]:
    """The hosts of the job in rank order, from the options of ``colossalai run`` of the same names.

    Without any of them the job runs on this machine alone.

    Raises:
        ConfigError: options that exclude each other, a host that the hostfile does not name, nothing left to run on.
    """
    if host is not None and hostfile is not None:
        raise ConfigError("--host and --hostfile both name the hosts; give one of them")
    if include is not None and exclude is not None:
        raise ConfigError("--include and --exclude cannot be used together; give one of them")
    if hostfile is None and (include is not None or exclude is not None):
        option = "--include" if include is not None else "--exclude"
        raise ConfigError(f"{option} chooses among the hosts of a hostfile; give --hostfile, or list the hosts with --host")
    if num_nodes != -1 and num_nodes < 1:
        raise ConfigError(f"--num_nodes {num_nodes}: must be at least 1")

    if hostfile is not None:
        hosts = _filter(parse_hostfile(hostfile), hostfile, include, exclude)
    elif host is not None:
        hosts = [Host(name) for name in parse_names(host, "--host")]
    else:
        hosts = [Host("localhost")]
    if num_nodes > len(hosts):
        raise ConfigError(
            f"--num_nodes {num_nodes}, but only {len(hosts)} host(s) are given: {', '.join(h.name for h in hosts)}; "
            "name more with --host or --hostfile"
        )
    return hosts if num_nodes == -1 else hosts[:num_nodes]


def _filter(hosts: list[Host], hostfile: str, include: str | None, exclude: str | None) -> list[Host]:
    if include is None and exclude is None:
        return hosts
    option, text = ("--include", include) if include is not None else ("--exclude", exclude)
    names = parse_names(text, option)
    _must_know(names, hosts, option, hostfile)
    chosen = [h for h in hosts if (h.name in names) == (include is not None)]
    if not chosen:
        raise ConfigError(f"--exclude {text} leaves no host of {hostfile}")
    return chosen


def _must_know(names: Iterable[str], hosts: Iterable[Host], option: str, hostfile: str) -> None:
    known = {h.name for h in hosts}
    missing = [name for name in names if name not in known]
    if missing:
        raise ConfigError(f"{option}: {', '.join(missing)} not found in {hostfile}, which names {', '.join(sorted(known))}")
