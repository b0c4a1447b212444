"""Hostfile, host list, include and exclude."""

import socket

import pytest

from colossalai.cli.launcher.hosts import Host, parse_hostfile, select_hosts
from colossalai.utils.errors import ConfigError


def write(tmp_path, text):
    path = tmp_path / "hosts.txt"
    path.write_text(text)
    return str(path)


def test_c8_hostfile_with_comment_blank_line_slots_and_duplicate(tmp_path):
    lines = ["# the two machines", "", "a", "b slots=4", "a"]
    path = write(tmp_path, "\n".join(lines[:4]))
    assert parse_hostfile(path) == [Host("a"), Host("b", slots=4)]
    with pytest.raises(ConfigError, match=r"line 5: host 'a' stands already in line 3"):
        parse_hostfile(write(tmp_path, "\n".join(lines)))


def test_hostfile_takes_comments_after_a_host_and_spaces_around(tmp_path):
    path = write(tmp_path, "  a  slots=2   # the fast one\r\n\tuser@10.0.0.7 # b\n")
    assert parse_hostfile(path) == [Host("a", 2), Host("user@10.0.0.7")]


@pytest.mark.parametrize(
    "line, word",
    [
        ("b slots=0", "slots=0"),
        ("b slots=four", "slots=four"),
        ("b 4", "'4'"),
        ("b slots=2 slots=3", "slots=3"),
        ("b max_slots=4", "max_slots=4"),
        ("-oProxyCommand=evil", "-oProxyCommand"),
        ("b;rm", "b;rm"),
    ],
)
def test_c8_bad_line_is_named(tmp_path, line, word):
    with pytest.raises(ConfigError, match="line 2") as caught:
        parse_hostfile(write(tmp_path, f"a\n{line}\n"))
    assert word in str(caught.value)


def test_c8_missing_or_empty_hostfile(tmp_path):
    with pytest.raises(ConfigError, match="--hostfile .*nowhere.txt cannot be read"):
        parse_hostfile(tmp_path / "nowhere.txt")
    with pytest.raises(ConfigError, match="names no host"):
        parse_hostfile(write(tmp_path, "# nothing\n"))


def names(hosts):
    return [host.name for host in hosts]


def test_select_hosts(tmp_path):
    path = write(tmp_path, "a\nb slots=4\nc\n")
    assert names(select_hosts()) == ["localhost"]
    assert names(select_hosts(host="x, y")) == ["x", "y"]
    assert names(select_hosts(hostfile=path)) == ["a", "b", "c"]
    assert names(select_hosts(hostfile=path, num_nodes=2)) == ["a", "b"]
    assert names(select_hosts(hostfile=path, include="c,a")) == ["a", "c"]  # ranks follow the hostfile
    assert names(select_hosts(hostfile=path, exclude="a")) == ["b", "c"]
    assert names(select_hosts(hostfile=path, exclude="a", num_nodes=1)) == ["b"]
    assert select_hosts(hostfile=path, include="b")[0].slots == 4


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(include="a", exclude="b"), "--include and --exclude"),
        (dict(include="d"), "--include: d not found"),
        (dict(exclude="d"), "--exclude: d not found"),
        (dict(exclude="a,b,c"), "leaves no host"),
        (dict(include="a,a"), "named twice"),
        (dict(num_nodes=4), "--num_nodes 4"),
        (dict(num_nodes=0), "--num_nodes 0"),
        (dict(host="a"), "--host and --hostfile"),
        (dict(hostfile=None, include="a"), "give --hostfile"),
        (dict(hostfile=None, host="a,,b"), "not a host name"),
        (dict(hostfile=None, host="a,a"), "named twice"),
        (dict(hostfile=None, num_nodes=2), "--num_nodes 2"),
    ],
)
def test_wrong_choice_of_hosts_names_the_option(tmp_path, options, message):
    path = write(tmp_path, "a\nb slots=4\nc\n")
    with pytest.raises(ConfigError, match=message):
        select_hosts(**{"hostfile": path, **options})


def test_which_hosts_are_this_machine():
    own = ["localhost", "127.0.0.1", "0.0.0.0", "::1", "me@localhost", socket.gethostname(), "127.0.0.2"]
    assert [name for name in own if not Host(name).local] == []
    assert not Host("198.51.100.1").local  # an address reserved for documentation
    assert not Host("no-such-host.invalid").local
