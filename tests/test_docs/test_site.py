"""The README's two commands, the support table, the site: what they say is so."""

import ast
import importlib.util
import json
import re
import shlex
import subprocess
import sys

import pytest

from .pages import PAGES, ROOT, blocks

README = (ROOT / "README.md").read_text(encoding="utf-8")


def load_matrix():
    spec = importlib.util.spec_from_file_location("support_matrix", ROOT / "docs" / "support_matrix.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


matrix = load_matrix()
RECORD = json.loads(matrix.RESULTS.read_text(encoding="utf-8"))


# ---------------------------------------------------------------- README


def commands():
    return [block.text for block in blocks(README) if block.language == "bash"]


def test_the_first_two_commands_are_one_line_each_and_set_themselves_up():
    assert len(commands()) == 2
    for command in commands():
        assert command.count("\n") == 1
        steps = [shlex.split(step) for step in command.split("&&")]
        assert steps[0] == ["python3", "-m", "venv", ".venv"]
        assert steps[1][:2] == [".venv/bin/pip", "install"] and "torch==2.13.0" in steps[1]
        assert steps[2][:2] == [".venv/bin/pip", "install"] and steps[2][-1].startswith(".[")
        assert len(steps) == 4


def test_the_extras_of_the_commands_exist():
    text = (ROOT / "setup.py").read_text(encoding="utf-8")
    known = set(re.findall(r'"(\w+)":', re.search(r"extras_require=\{(.*?)\}", text)[1]))
    for command in commands():
        assert set(re.search(r"\.\[([\w,]+)\]", command)[1].split(",")) <= known


def runs_of(text):
    """Every ``colossalai run`` in a text, as (our options and script, the script's arguments)."""
    for line in text.splitlines():
        if "colossalai run " in line and "examples/" in line:
            words = shlex.split(line[line.index("colossalai run ") :].split("#")[0])[2:]
            at = next(i for i, word in enumerate(words) if word.endswith(".py"))
            yield words[: at + 1], words[at + 1 :]


def test_the_commands_use_options_that_exist(monkeypatch, tmp_path):
    from colossalai.cli import cli
    from colossalai.cli.launcher.run import make_job

    (tmp_path / "hosts.txt").write_text("node1 slots=8\nnode2 slots=8\n")
    monkeypatch.chdir(tmp_path)
    found = list(runs_of(README))
    assert len(found) == 3
    scripts = {}
    for own, theirs in found:
        make_job(cli.commands["run"].make_context("run", own).params)
        scripts.setdefault(own[-1], []).extend(theirs)
    for script, words in scripts.items():
        assert (ROOT / script).is_file()
        sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / script).parent.glob("*.py"))
        known = re.findall(r'add(?:_argument)?\(\s*"(--\w+)"', sources)
        assert set(word for word in words if word.startswith("--")) <= set(known)


def test_ci_runs_exactly_the_second_command():
    text = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    program = re.search(r"awk '(.*?)' README.md", text)[1]
    said = subprocess.run(["awk", program, "README.md"], cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert said.stdout == commands()[1]


def test_links_lead_somewhere():
    for page in [ROOT / "README.md", *PAGES]:
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


# ---------------------------------------------------------------- support table


def test_c87_table_is_what_the_results_give():
    again = "run: python docs/support_matrix.py"
    assert set(RECORD["claims"]) == {claim.key for claim in matrix.CLAIMS}, f"{again} results.xml"
    assert matrix.PAGE.read_text(encoding="utf-8") == matrix.render_page(RECORD), again
    assert matrix.render_readme(README, RECORD) == README, again


def test_c87_shown_claims_name_tests_that_exist():
    defined = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        defined |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for claim in matrix.CLAIMS:
        if matrix.holds(RECORD["claims"][claim.key]):
            for pattern in claim.tests:
                function = re.match(r"::(\w+)", pattern).group(1)
                assert function in defined, f"{claim.text}: {pattern}"


def junit(path, **outcomes):
    cases = []
    for name, outcome in outcomes.items():
        inside = "" if outcome == "passed" else f"<{outcome}/>"
        cases.append(f'<testcase classname="tests.test_x" name="{name}[zero1-a]">{inside}</testcase>')
    path.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    return path


@pytest.mark.parametrize(
    "outcome, shown", [("passed", True), ("failure", False), ("error", False), ("skipped", False), (None, False)]
)
def test_c87_nothing_is_claimed_without_a_passing_test(tmp_path, outcome, shown):
    claims = [matrix.Claim("flies", "zero1", (r"::test_flies\[zero1-",))]
    results = matrix.read_results([junit(tmp_path / "r.xml", **({"test_flies": outcome} if outcome else {}))])
    judged = matrix.judge(results, claims)
    assert matrix.holds(judged[claims[0].key]) == shown
    assert ("flies" in matrix.render_table(judged, claims)) == shown


def test_c87_one_failure_of_several_runs_is_enough(tmp_path):
    good, bad = junit(tmp_path / "a.xml", test_a="passed"), junit(tmp_path / "b.xml", test_a="failure")
    claims = [matrix.Claim("a", "zero1", (r"::test_a\[zero1-",))]
    assert matrix.holds(matrix.judge(matrix.read_results([good]), claims)["a / zero1"])
    assert not matrix.holds(matrix.judge(matrix.read_results([good, bad]), claims)["a / zero1"])
    both = [matrix.Claim("a", "zero1", (r"::test_a\[zero1-", r"::test_b\[zero1-"))]
    assert not matrix.holds(matrix.judge(matrix.read_results([good]), both)["a / zero1"])


# ---------------------------------------------------------------- site


def test_the_site_builds_without_warnings(tmp_path):
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    index = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert "numbers" in index and "&lt;!--" not in index  # the marks of the blocks stay invisible
    assert not (tmp_path / "site" / "support_matrix.py").exists()


def test_every_page_is_in_the_navigation():
    nav = re.findall(r"^  - [^:]+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.M)
    assert sorted(nav) == sorted(page.name for page in PAGES)
