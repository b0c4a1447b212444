"""The house is in order, and the checker would see it if it were not."""

import re

import pytest

from tests.house import FLOORS, ROOT, violations

pytestmark = pytest.mark.fast


def test_house_rules():
    found = list(violations())
    assert not found, "\n".join(found)


def test_floors_are_those_of_the_design_document():
    page = ROOT / "docs" / "design.md"
    rows = re.findall(r"^ *(\d)  +(\w+/.*)$", page.read_text(encoding="utf-8"), re.M) if page.is_file() else []
    if not rows:
        pytest.skip("docs/design.md does not draw the floors")
    drawn = {name: int(n) for n, row in rows for name in re.findall(r"(\w+)(?:/(?![\w*])|\.py\b)", row)}
    assert {name: n for name, n in drawn.items() if name != "version"} == {k: n for k, n in FLOORS.items() if k and n >= 0}


SOUND = {
    "__init__.py": "from .booster import Booster",
    "utils/__init__.py": "",
    "comm/__init__.py": "import torch.distributed as dist\n\ndef total(x):\n    dist.all_reduce(x)\n",
    "zero/__init__.py": "from colossalai.comm import total\nfrom ..utils import nothing\n",
    "booster/__init__.py": "from colossalai import zero\n",
    "legacy/__init__.py": "from ..booster import Booster",
}


@pytest.mark.parametrize(
    ("file", "text", "offence"),
    [
        ("utils/__init__.py", "from ..booster import x", "utils imports booster"),
        ("utils/__init__.py", "import colossalai.zero.low_level", "utils imports zero"),
        ("utils/__init__.py", "def f():\n    from colossalai import booster", "utils imports booster"),
        ("booster/__init__.py", "from ..legacy import y", "booster imports legacy"),
        ("booster/__init__.py", "import colossalai", "booster imports colossalai"),
        ("pipeline/__init__.py", "from ..zero import x", "pipeline imports zero"),
        ("logging/__init__.py", "from ..kernel import x", "circle: logging -> kernel -> logging"),
        ("zero/__init__.py", "import torch.distributed as d\nd.all_gather([], 0)", ":2 all_gather belongs to comm/"),
        ("zero/__init__.py", "from torch.distributed import broadcast as b", ":1 broadcast belongs to comm/"),
        ("zero/__init__.py", "import torch\ntorch.distributed.reduce_scatter_single(1)", "belongs to comm/"),
        ("zero/__init__.py", "def f(x):\n    assert x", ":2 assert"),
        ("zero/__init__.py", "x = 1\n" * 500, "501 lines"),
        ("zero/__init__.py", "def f(x):\n" + "    x += 1\n" * 61, "f has a body of 61 lines"),
    ],
)
def test_the_checker_sees_an_offence(tmp_path, file, text, offence):
    extra = {"kernel/__init__.py": "from ..logging import z", "logging/__init__.py": "", "pipeline/__init__.py": ""}
    for name, content in (SOUND | extra | {file: text}).items():
        path = tmp_path / "colossalai" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")
    found = list(violations(tmp_path))
    assert len(found) >= 1 and any(offence in line for line in found), found


def test_the_checker_accepts_a_house_in_order(tmp_path):
    typed = {"zero/typed.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..booster import Booster\n"}
    for name, content in (SOUND | typed).items():
        path = tmp_path / "colossalai" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")
    assert list(violations(tmp_path)) == []
