"""Make the support table from test results: docs/support.json, docs/support.md and the block in the README.

    pytest tests --junitxml=results.xml
    python docs/support_matrix.py results.xml [more.xml ...]      # several runs, for instance one on a GPU, are joined

A claim names the tests that prove it. It is shown only if such tests ran, at least one passed and none failed. Without
arguments the two texts are written again from docs/support.json.
"""

import json
import platform
import re
import sys
import xml.etree.ElementTree as xml
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "support.json"
PAGE = ROOT / "docs" / "support.md"
README = ROOT / "README.md"
BEGIN, END = "<!-- support: begin -->", "<!-- support: end -->"

# How a plugin is called in the ids of tests, and to people.
PLUGINS = {"ddp": "DDP", "fsdp": "FSDP", "zero1": "ZeRO-1", "zero2": "ZeRO-2"}
STAGE = {"zero1": "1", "zero2": "2"}


@dataclass(frozen=True)
class Claim:
    """Something the library can do, for one plugin or (``plugin`` empty) for all; ``tests``: patterns of ids."""

    text: str
    plugin: str
    tests: tuple[str, ...]

    @property
    def key(self) -> str:
        return f"{self.text} / {self.plugin}"


def _with_id(function: str, part: str) -> str:
    """Tests of this function whose bracketed id has ``part`` between dashes."""
    return rf"::{function}\[(.*-)?{re.escape(part)}(-.*)?\]"


def _each(text: str, *functions: str, plugins: Iterable[str] = PLUGINS) -> list[Claim]:
    """One claim a plugin, from tests that carry the plugin's name in their id."""
    return [Claim(text, p, tuple(_with_id(f, p) for f in functions)) for p in plugins]


def _stages(text: str, *functions: str) -> list[Claim]:
    """Claims for the two ZeRO plugins, from tests whose id ends with the stage."""
    return [Claim(text, p, tuple(rf"::{f}\[(.*-)?{s}\]" for f in functions)) for p, s in STAGE.items()]


def _one(text: str, plugin: str, function: str, part: str = "") -> Claim:
    return Claim(text, plugin, (_with_id(function, part) if part else rf"::{function}(\[|$)",))


PARITY = "::test_parity_with_one_process"
ADAPTERS = "test_adapters_and_base_are_read_by_peft_and_transformers"
MID_EPOCH = "test_c82_resume_in_mid_epoch_keeps_the_order_on_any_number_of_ranks"
CLAIMS: list[Claim] = [
    *_each("the numbers of one process, fp32, 1 to 4 processes", "test_parity_with_one_process"),
    _one("bf16", "ddp", "test_mixed_precision_of_the_booster", "bf16"),
    _one("bf16", "fsdp", "test_mixed_precision_keeps_fp32_weights"),
    *[Claim("bf16", p, (rf"::test_parity_in_16_bits\[{p}-.*-bf16\]",)) for p in STAGE],
    _one("fp16 with loss scaling", "ddp", "test_mixed_precision_of_the_booster", "fp16"),
    *[Claim("fp16 with loss scaling", p, (rf"::test_parity_in_16_bits\[{p}-.*-fp16-",)) for p in STAGE],
    *[Claim("gradient accumulation", p, (rf"{PARITY}\[\d-{p}-.*plain4\]",)) for p in PLUGINS],
    *[Claim("accumulation in `no_sync`", p, (rf"{PARITY}\[\d-{p}-.*no_sync4\]",)) for p in PLUGINS],
    *_each("clipping by the global norm", "test_c33_clipped_update_and_norm"),
    *[Claim('`loss_reduction="token"`', p, (rf"::test_token_and_plain_mean\[token-{p}-",)) for p in PLUGINS],
    *_each("whole gradients: `get_param_grad`", "test_c14_gradients_are_read_whole_and_unscaled"),
    *_each("several models in one process", "test_c13_several_models_do_not_touch_each_other"),
    *_each("frozen parameters", "test_c18_frozen_parameters_stay_bitwise"),
    *_stages("any optimizer, Adafactor and Muon included", "test_c26_any_optimizer", "test_c26_muon_gets_whole_matrices"),
    *_each("fp32 resume is bitwise", "test_a_resumed_run_is_bitwise_the_same"),
    *_each("Hugging Face reads its checkpoints", "test_c70_hugging_face_reads_what_every_plugin_writes"),
    *_each("reads what another plugin wrote", "test_every_plugin_reads_what_others_wrote"),
    *_each("LoRA adapters", ADAPTERS, plugins=("ddp", "zero1", "zero2")),
    *[
        Claim("2P elements sent a step, counted from outside", p, (rf"::test_c85_two_p_elements_a_step\[{s}-",))
        for p, s in STAGE.items()
    ],
    *_each("a step as one of many ranks, without memory or network", "test_every_plugin_steps_as_one_rank_of_many"),
    *_each("one NVIDIA GPU", "test_parity_on_one_gpu"),
    _one("`colossalai run` on one machine", "", "test_two_processes_get_the_arguments_and_the_environment_exactly"),
    _one("`colossalai run` with two agents", "", "test_c10_two_agents_on_this_machine_train_together"),
    _one("`colossalai run` over ssh", "", "test_c10_two_remote_hosts_over_ssh"),
    _one("start under Slurm", "", "test_c10_slurm_two_processes_meet"),
    _one("data goes on in the middle of an epoch", "", MID_EPOCH),
    _one("ranks that disagree are told about what", "", "test_c11_ranks_that_disagree_are_told_about_what"),
    _one("every code block of these pages runs", "", "test_c87_blocks_of_a_page_run"),
]  # fmt: skip


def read_results(paths: Iterable[Path]) -> dict[str, str]:
    """``{test id: passed | failed | skipped}`` of JUnit XML files; a test that failed in one of them has failed."""
    rank = {"skipped": 0, "passed": 1, "failed": 2}
    found: dict[str, str] = {}
    for path in paths:
        for case in xml.parse(path).getroot().iter("testcase"):
            kinds = {child.tag for child in case}
            outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
            test = f"{case.get('classname')}::{case.get('name')}"
            found[test] = max(found.get(test, "skipped"), outcome, key=rank.__getitem__)
    return found


def judge(results: dict[str, str], claims: Iterable[Claim] = CLAIMS) -> dict[str, dict[str, int]]:
    """``{claim: {"passed": n, "failed": n}}``. Each pattern of a claim needs a passing test, else nothing counts."""
    judged = {}
    for claim in claims:
        outcomes = [[results[t] for t in results if re.search(pattern, t)] for pattern in claim.tests]
        complete = all("passed" in some for some in outcomes)
        every = [outcome for some in outcomes for outcome in some]
        judged[claim.key] = {
            "passed": every.count("passed") if complete else 0,
            "failed": every.count("failed"),
        }
    return judged


def holds(judgement: dict[str, int] | None) -> bool:
    return judgement is not None and judgement["passed"] > 0 and judgement["failed"] == 0


def render_table(judged: dict[str, dict[str, int]], claims: Iterable[Claim] = CLAIMS) -> str:
    """The table as Markdown: the number of passing tests where a claim holds, a dash where it does not."""
    claims = list(claims)
    lines = ["| | " + " | ".join(PLUGINS.values()) + " |", "|---|" + "---|" * len(PLUGINS)]
    for text in dict.fromkeys(claim.text for claim in claims if claim.plugin):
        by_plugin = {claim.plugin: claim for claim in claims if claim.text == text}
        cells = [_cell(by_plugin.get(plugin), judged) for plugin in PLUGINS]
        if any(cell != "–" for cell in cells):
            lines.append(f"| {text} | " + " | ".join(cells) + " |")
    everywhere = [(claim.text, _cell(claim, judged)) for claim in claims if not claim.plugin]
    rest = [f"| {text} | {cell} |" for text, cell in everywhere if cell != "–"]
    if rest:
        lines += ["", "| whatever the plugin | |", "|---|---|", *rest]
    return "\n".join(lines)


def _cell(claim: Claim | None, judged: dict[str, dict[str, int]]) -> str:
    judgement = judged.get(claim.key) if claim else None
    return f"✓ {judgement['passed']}" if holds(judgement) else "–"


def render_page(record: dict) -> str:
    """docs/support.md."""
    where = ", ".join(f"{name} {value}" for name, value in record["environment"].items())
    return f"""# What works today

This table is made from test results by `docs/support_matrix.py`; nobody writes it. A ✓ stands where tests for exactly
this ran, at least one passed and none failed; the number is how many passed. A dash means that there is no such test, or
that it did not pass.

{render_table(record["claims"])}

Tests run with {where}.
"""


def render_readme(text: str, record: dict) -> str:
    """The README with its block replaced."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{README.name}: {BEGIN} and {END} must stand in it, in this order")
    return f"{before}{BEGIN}\n{render_table(record['claims'])}\n{END}{after}"


def environment() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {"Python": platform.python_version()}
    for package in ("torch", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            pass
    return found


def main(paths: list[str]) -> None:
    if paths:
        record = {"environment": environment(), "claims": judge(read_results(Path(path) for path in paths))}
        RESULTS.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    record = json.loads(RESULTS.read_text(encoding="utf-8"))
    PAGE.write_text(render_page(record), encoding="utf-8")
    README.write_text(render_readme(README.read_text(encoding="utf-8"), record), encoding="utf-8")
    shown = sum(holds(judgement) for judgement in record["claims"].values())
    print(f"{shown} of {len(record['claims'])} claims hold")


if __name__ == "__main__":
    main(sys.argv[1:])
