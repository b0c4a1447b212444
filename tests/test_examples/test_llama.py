"""examples/language/llama: trains on every plugin, resumes bitwise, completes a line."""

import json
import math
import shutil
import sysconfig
import zlib
from pathlib import Path

import pytest

from tests.harness.pool import WorkerFailure

from .drive import LLAMA, helpers_of, run_in_rank, start

TRAIN, GENERATE = LLAMA / "train.py", LLAMA / "generate.py"
SHORT = ["--seq_len", "32", "--batch_size", "4", "--eval_windows", "32", "--log_every", "1", "--eval_every", "4"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A folder with a little text: 8 steps of two forwards see the training file more than twice."""
    folder = tmp_path_factory.mktemp("text")
    source = Path(sysconfig.get_paths()["stdlib"], "heapq.py").read_text(encoding="utf-8")
    held_out = next(name for name in map("{}.py".format, range(1000)) if zlib.crc32(name.encode()) % 20 == 0)
    (folder / "training.py").write_text(source[:1700])
    (folder / held_out).write_text(source[1700:2900])
    return str(folder)


@pytest.fixture
def train(workers):
    def run(*argv, ranks=2, timeout=120):
        kwargs = {"script": str(TRAIN), "argv": [*SHORT, *map(str, argv)], "helpers": helpers_of(TRAIN)}
        return workers(ranks).run(run_in_rank, timeout=timeout, **kwargs)

    return run


def records(folder, *names):
    """[(step, value, ...)] of the lines of a run's metrics that have all these entries."""
    lines = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], *(line[name] for name in names)) for line in lines if all(name in line for name in names)]


def test_main_job_as_a_user_starts_it(tmp_path):
    run = tmp_path / "run"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    options = ["--steps", "12", "--warmup", "2", "--save", run, "--plot", tmp_path / "loss.png"]
    printed = start([*launcher, str(TRAIN), *SHORT, *map(str, options)], timeout=240)
    assert "held-out loss" in printed and "2 process(es)" in printed and "TFLOPS" in printed
    held_out = records(run, "held_out_loss")
    assert [step for step, _ in held_out] == [0, 4, 8, 12]
    assert abs(held_out[0][1] - math.log(264)) < 0.2 and held_out[-1][1] < held_out[0][1] - 1
    for name in ("tokens_per_second", "tflops", "tflops_megatron", "memory_gib"):
        assert len(records(run, name)) == 12 and all(value > 0 for _, value in records(run, name))
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    # Any folder written by --save is a Hugging Face one.
    line = start([str(GENERATE), str(run / "model"), "--prompt", "def main(", "--max_new_tokens", "8"], timeout=120)
    assert line.splitlines()[-1].startswith("def main(")


def test_one_process_without_a_launcher(tmp_path, text):
    options = ["--steps", "2", "--data", text, "--metrics", tmp_path / "metrics.jsonl", "--plugin", "ddp"]
    assert "1 process(es)" in start([str(TRAIN), *SHORT, *map(str, options)], timeout=200)
    assert len(records(tmp_path, "loss")) == 2


def leave_as_killed_while_saving(folder):
    """Half of the new parts have taken their place, and an older save never came so far."""
    (folder / ".partial" / "model").mkdir(parents=True)
    (folder / ".complete").mkdir()
    for name in ("model", "state.bin"):
        (folder / name).rename(folder / ".complete" / name)


@pytest.mark.parametrize("plugin", ["ddp", "fsdp", "zero1", "zero2"])
def test_resume_is_bitwise_on_every_plugin(train, tmp_path, text, plugin):
    common = ["--plugin", plugin, "--data", text, "--steps", 8, "--grad_accum", 2, "--lr", 1e-2, "--warmup", 2]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train(*common, "--save", whole) == [None, None]
    assert train(*common, "--save", parts, "--stop_at", 5) == [None, None]
    leave_as_killed_while_saving(parts)
    # What the command line leaves out is taken from the checkpoint.
    assert train("--resume", parts, "--save", parts) == [None, None]
    assert len(records(whole, "loss")) == 8
    assert records(parts, "loss", "lr") == records(whole, "loss", "lr")
    assert records(parts, "held_out_loss")[-1] == records(whole, "held_out_loss")[-1]
    assert not (parts / ".complete").exists() and not (parts / ".partial").exists()
    for file in ("model/model-00001.safetensors", "model/config.json"):
        assert (parts / file).read_bytes() == (whole / file).read_bytes()


def test_plugins_train_alike(train, tmp_path, text):
    losses = {}
    for plugin in ("ddp", "fsdp", "zero1", "zero2"):
        options = ["--plugin", plugin, "--data", text, "--steps", 3, "--warmup", 1, "--grad_accum", 2]
        train(*options, "--metrics", tmp_path / plugin / "metrics.jsonl", "--grad_checkpoint")
        losses[plugin] = [loss for _, loss in records(tmp_path / plugin, "loss")]
    assert all(losses[plugin] == pytest.approx(losses["ddp"], rel=1e-5) for plugin in losses)


@pytest.mark.parametrize("options", [("zero1", "bf16"), ("zero2", "fp16"), ("fsdp", "bf16"), ("ddp", "bf16"), ("ddp", "fp16")])
def test_low_precision(train, tmp_path, text, options):
    plugin, precision = options
    train("--plugin", plugin, "--precision", precision, "--data", text, "--steps", 6, "--warmup", 1,
          "--metrics", tmp_path / "metrics.jsonl")  # fmt: skip
    held_out = records(tmp_path, "held_out_loss")
    assert held_out[-1][1] < held_out[0][1] - 0.5


def test_resume_on_another_number_of_ranks_with_byte_pairs(train, tmp_path, text):
    common = ["--data", text, "--tokenizer", "bpe", "--vocab_size", 300, "--warmup", 1]
    train(*common, "--steps", 4, "--stop_at", 2, "--save", tmp_path / "two")
    train(*common, "--steps", 4, "--resume", tmp_path / "two", "--save", tmp_path / "one", ranks=1)
    assert [step for step, _ in records(tmp_path / "one", "loss")] == [1, 2, 3, 4]
    assert records(tmp_path / "one", "loss")[:2] == records(tmp_path / "two", "loss")
    vocab = [json.loads((tmp_path / run / "model/tokenizer.json").read_text())["model"] for run in ("one", "two")]
    assert vocab[0] == vocab[1] and len(vocab[0]["merges"]) > 0


def test_misuse_says_what_to_change(train, tmp_path, text):
    assert "--resume" in train("--resume", tmp_path / "nothing", ranks=1)[0]
    assert train("--plugin", "fsdp", "--precision", "fp16", ranks=1) == [2]
    for plugin in ("gemini", "3d"):
        with pytest.raises(WorkerFailure) as failure:
            train("--plugin", plugin, "--data", text, ranks=1)
        assert failure.value.failure.error == "NotBuiltError"
    assert "--data" in train("--data", tmp_path, ranks=1)[0]
    train("--data", text, "--steps", 1, "--save", tmp_path / "run", ranks=1)
    assert train("--config", "20m", "--resume", tmp_path / "run", ranks=1) == [2]
    shutil.rmtree(tmp_path / "run" / "optimizer")
    assert "optimizer" in train("--data", text, "--resume", tmp_path / "run", ranks=1)[0]
