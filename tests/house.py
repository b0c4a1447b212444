"""The rules of the house, read from the syntax trees of the package: ``violations()`` names every offence.

- a file has at most 500 lines, a function at most 60 in its body (signature and docstring do not count)
- a package imports only its own floor and those below (FLOORS), never in a circle; the ways to spread a model,
  which share a floor, do not import each other. Imports for type checking do not count, imports inside functions do
- collectives of torch.distributed are used in colossalai/comm/ only, whatever name they were imported under
- ``assert`` stands in tests only, since ``python -O`` removes it
"""

import ast
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "colossalai"
FILE_LINES, BODY_LINES = 500, 60

FLOORS = {
    "version": -1,
    **dict.fromkeys(("accelerator", "kernel", "logging", "context", "utils"), 0),
    **dict.fromkeys(("cluster", "comm", "device", "initialize"), 1),
    "tensor": 2,
    **dict.fromkeys(("nn", "lazy", "quantization", "interface", "amp"), 3),
    **dict.fromkeys(("zero", "pipeline", "shardformer", "moe"), 4),
    "checkpoint_io": 5,
    **dict.fromkeys(("booster", "planner", "inference"), 6),
    **dict.fromkeys(("cli", "testing"), 7),
    "": 8,  # colossalai/__init__.py
}
ALIAS_FLOOR = 6.5  # packages of the public API that are only aliases: they may import all, only cli and the root them
WAYS = {"zero", "pipeline", "shardformer", "moe"}
COLLECTIVES = set(
    "all_reduce all_reduce_coalesced all_gather all_gather_coalesced all_gather_into_tensor all_gather_object "
    "all_to_all all_to_all_single all_gather_tensor all_gather_tensor_autograd all_gather_single "
    "all_gather_single_autograd broadcast broadcast_object_list gather gather_object scatter scatter_object_list "
    "reduce reduce_scatter reduce_scatter_tensor reduce_scatter_tensor_autograd reduce_scatter_single "
    "reduce_scatter_single_autograd all_to_all_single_autograd batch_isend_irecv P2POp isend irecv send recv "
    "send_object_list recv_object_list".split()
)
DISTRIBUTED = ("torch.distributed.", "torch.ops._c10d_functional.", "torch.ops.c10d.")


@dataclass
class Facts(ast.NodeVisitor):
    """What one file imports and uses."""

    parts: list[str]
    packages: set[str]
    imports: list[tuple[str, int]] = field(default_factory=list)
    collectives: set[tuple[str, int]] = field(default_factory=set)
    asserts: list[int] = field(default_factory=list)
    long: list[tuple[str, int, int]] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)

    @property
    def package(self) -> str:
        """The part of the package the file is in: ``booster``, or empty for ``colossalai/__init__.py``."""
        return self.parts[1] if len(self.parts) > 1 and self.parts[1] != "__init__" else ""

    def read(self, tree: ast.Module) -> "Facts":
        for node in ast.walk(tree):  # names first: an import may stand below its use
            if isinstance(node, ast.Import):
                self.names |= {a.asname or a.name.split(".")[0]: a.name if a.asname else a.name.split(".")[0] for a in node.names}
            elif isinstance(node, ast.ImportFrom):
                self.names |= {a.asname or a.name: f"{self.source(node)}.{a.name}" for a in node.names}
        self.visit(tree)
        return self

    def source(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        return ".".join([*self.parts[: len(self.parts) - node.level], *([node.module] if node.module else [])])

    def depend(self, module: str, line: int) -> None:
        head, *rest = module.split(".")
        if head == PACKAGE:
            self.imports.append((rest[0] if rest and rest[0] in self.packages | FLOORS.keys() else "", line))

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" in ast.unparse(node.test):
            for other in node.orelse:
                self.visit(other)
        else:
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.depend(alias.name, node.lineno)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        source = self.source(node)
        for alias in node.names:
            self.depend(f"{source}.{alias.name}", node.lineno)
            if f"{source}.".startswith(DISTRIBUTED) and alias.name in COLLECTIVES | {"*"}:
                self.collectives.add((alias.name, node.lineno))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        head, _, rest = ast.unparse(node).partition(".")
        path = f"{self.names.get(head, head)}.{rest}"
        known = path.startswith(DISTRIBUTED) or re.search(r"\b(dist|c10d|distributed)\.\w+$", path)
        if node.attr in COLLECTIVES and known:
            self.collectives.add((node.attr, node.lineno))
        self.generic_visit(node)

    def visit_Assert(self, node: ast.Assert) -> None:
        self.asserts.append(node.lineno)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        body = node.body[1:] if ast.get_docstring(node) is not None and len(node.body) > 1 else node.body
        size = node.end_lineno - body[0].lineno + 1
        if size > BODY_LINES:
            self.long.append((node.name, size, node.lineno))
        self.generic_visit(node)

    visit_AsyncFunctionDef = visit_FunctionDef


def floor(package: str) -> float:
    return FLOORS.get(package, ALIAS_FLOOR)


def upward(me: str, other: str) -> bool:
    """Whether an import of ``other`` by ``me`` breaks the order of the floors."""
    return me != other and (floor(other) > floor(me) or {me, other} <= WAYS)


def circle(edges: dict[str, set[str]], start: str) -> tuple[str, ...] | None:
    """The shortest way from a package back to itself."""
    ways, seen = deque([(start,)]), set()
    while ways:
        way = ways.popleft()
        for other in sorted(edges.get(way[-1], ())):
            if other == start:
                return (*way, other)
            if other not in seen:
                seen.add(other)
                ways.append((*way, other))
    return None


def violations(root: Path = ROOT) -> Iterator[str]:
    """Every offence as ``file:line what``; nothing if the house is in order."""
    paths = sorted((root / PACKAGE).rglob("*.py"))
    packages = {path.relative_to(root).with_suffix("").parts[1] for path in paths} - {"__init__"}
    edges: dict[str, set[str]] = {}
    for path in paths:
        name = path.relative_to(root)
        if name.as_posix() == f"{PACKAGE}/version.py":
            continue  # written by the build
        lines = path.read_text(encoding="utf-8").splitlines()
        if len(lines) > FILE_LINES:
            yield f"{name}:{FILE_LINES + 1} the file has {len(lines)} lines, the limit is {FILE_LINES}"
        facts = Facts(list(name.with_suffix("").parts), packages).read(ast.parse("\n".join(lines)))
        yield from (f"{name}:{line} {what} has a body of {size} lines" for what, size, line in facts.long)
        yield from (f"{name}:{line} assert: raise a type of utils.errors" for line in facts.asserts)
        if facts.package != "comm":
            yield from (f"{name}:{line} {what} belongs to comm/" for what, line in sorted(facts.collectives))
        for other, line in facts.imports:
            if other != facts.package:
                edges.setdefault(facts.package, set()).add(other)
                if upward(facts.package, other):
                    yield f"{name}:{line} {facts.package or PACKAGE} imports {other or PACKAGE}, which is not below it"
    rings = {frozenset(ring): ring for start in sorted(edges) if (ring := circle(edges, start))}
    yield from (f"circle: {' -> '.join(ring)}" for ring in rings.values())
