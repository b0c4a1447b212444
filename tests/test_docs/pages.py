"""The code blocks of a page: which are joined to a script, which are files, which are shell."""

import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
_FENCE = re.compile(r"^(?P<fence>`{3,})[ ]*(?P<language>[\w+-]*)[ ]*\n(?P<body>.*?)^(?P=fence)[ ]*$", re.M | re.S)
_MARK = re.compile(r"<!--[ ]*(?P<kind>run|file)(?::[ ]*(?P<value>[^>]*?))?[ ]*-->\s*\Z")
LANGUAGES = ("python", "bash", "text")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, text, first line, and the comment before it (``run`` or ``file``, its value)."""

    language: str
    text: str
    line: int
    kind: str | None = None
    value: str = ""


@dataclass
class Script:
    """Python blocks that run one after the other in one program, in ``procs`` processes."""

    procs: int
    text: str = ""


@dataclass
class Page:
    """What is to be done for one page, in this order: files, scripts, shell blocks."""

    files: dict[str, str] = field(default_factory=dict)
    scripts: list[Script] = field(default_factory=list)
    shell: list[Block] = field(default_factory=list)


def blocks(text: str) -> list[Block]:
    """All fenced blocks of a page."""
    found = []
    for match in _FENCE.finditer(text):
        mark = _MARK.search(text[: match.start()])
        kind, value = (mark["kind"], mark["value"] or "") if mark else (None, "")
        line = text.count("\n", 0, match.start()) + 2
        found.append(Block(match["language"], match["body"], line, kind, value))
    return found


def parse(text: str) -> Page:
    """The page's work. Raises ValueError for a block that is neither run nor marked as text."""
    page = Page()
    for block in blocks(text):
        if block.language not in LANGUAGES:
            raise ValueError(f"line {block.line}: a block is {', '.join(LANGUAGES)}, not {block.language!r}")
        if block.language == "text":
            continue
        if block.kind == "file":
            page.files[block.value] = block.text
        elif block.language == "bash":
            page.shell.append(block)
        else:
            if block.kind == "run":
                options = dict(part.split("=") for part in block.value.split())
                page.scripts.append(Script(int(options.pop("procs", 1))))
                if options:
                    raise ValueError(f"line {block.line}: unknown option {', '.join(options)}")
            if not page.scripts:
                raise ValueError(f"line {block.line}: the first Python block of a page needs <!-- run --> before it")
            # Blank lines keep the line numbers of the page in tracebacks.
            script = page.scripts[-1]
            script.text += "\n" * (block.line - 1 - script.text.count("\n")) + block.text
    return page
