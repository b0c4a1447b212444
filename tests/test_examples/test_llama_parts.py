"""The parts of examples/language/llama that need no training."""

import json
import sys

import numpy as np
import pytest

from .drive import LLAMA, helpers_of


@pytest.fixture
def parts(monkeypatch):
    """The example's modules by name, forgotten afterwards."""
    monkeypatch.syspath_prepend(str(LLAMA))
    import configs
    import data
    import metrics

    yield {"configs": configs, "data": data, "metrics": metrics}
    for name in helpers_of(LLAMA / "train.py"):
        sys.modules.pop(name, None)


def test_byte_tokens_are_bytes_and_come_back(parts):
    data = parts["data"]
    tokenizer = data.byte_tokenizer()
    text = "".join(map(chr, range(0x20, 0x180))) + "\n\tdef f(): 'π' 🐍\r\n\x00"
    assert tokenizer.encode(text).ids == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.token_to_id(data.END_OF_TEXT) == 256 < data.BYTE_VOCAB
    tokens = data.encode(tokenizer, [b"ab", b"c"], by_bytes=True)
    assert tokens.tolist() == [97, 98, 256, 99, 256] and tokens.dtype == np.uint16


def test_split_is_by_file_and_does_not_move(parts, tmp_path):
    for number in range(100):
        (tmp_path / f"{number:03}.txt").write_text(f"text {number:03}")
    (tmp_path / "image.png").write_bytes(b"\x89\0\0")
    train, held_out = parts["data"].read_texts(str(tmp_path))
    assert len(train) + len(held_out) == 100 and 1 <= len(held_out) <= 15 and train == sorted(train)
    (tmp_path / "000 a new one.txt").write_text("new")
    after = parts["data"].read_texts(str(tmp_path))[1]
    assert set(held_out) <= set(after)


def test_one_file_holds_out_its_end(parts, tmp_path):
    (tmp_path / "all.txt").write_text("x" * 1000)
    train, held_out = parts["data"].read_texts(str(tmp_path))
    assert [len(text) for text in train + held_out] == [950, 50]


def test_standard_library_is_there(parts):
    train, held_out = parts["data"].read_texts(None)
    assert sum(map(len, train)) > 5e6 and 1e5 < sum(map(len, held_out)) < 2e6


@pytest.mark.parametrize(
    "name, billions", [("tiny", 0.0008), ("20m", 0.02), ("100m", 0.1), ("1b", 1.0), ("7b", 6.5), ("13b", 12.7), ("70b", 68.5)]
)
def test_sizes_are_what_they_are_called(parts, name, billions):
    config = parts["configs"].llama_config(name, 264, 128, 256)
    hidden, head = config.hidden_size, config.hidden_size // config.num_attention_heads
    attention = 2 * hidden * hidden + 2 * hidden * head * config.num_key_value_heads
    layer = attention + 3 * hidden * config.intermediate_size
    assert config.num_hidden_layers * layer / 1e9 == pytest.approx(billions, rel=0.06)


def test_tflops_follow_the_formulas(parts):
    config = parts["configs"].llama_config("7b", 32000, 4096, 2)
    for recompute, k in ((False, 3), (True, 4)):
        speed = parts["metrics"].Speed(config, 6_738_415_616, 4096, recompute, tokens_per_step=500, ranks=2)
        assert speed.flop == 2 * k * 6_738_415_616
        share = 1 + 4096 / (6 * 4096) + 32000 / (16 * 32 * 4096)
        assert speed.flop_megatron == pytest.approx(24 * k * 32 * 4096**2 * share)
        speed.steps = 2
        rates = speed.read()
        assert rates["tflops"] == pytest.approx(rates["tokens_per_second"] * speed.flop / 2 / 1e12)
        assert speed.steps == 0 and rates["memory_gib"] > 0


def test_resumed_metrics_drop_what_came_after(parts, tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = parts["metrics"].Metrics(path, 0)
    for step in range(1, 5):
        first.add(step=step, loss=1 / step)
    again = parts["metrics"].Metrics(tmp_path / "other.jsonl", 2, earlier=path)
    again.add(step=3, loss=0.1)
    assert [json.loads(line)["step"] for line in (tmp_path / "other.jsonl").read_text().splitlines()] == [1, 2, 3]
    assert again.of("loss") == ([1, 2, 3], [1.0, 0.5, 0.1])
    assert parts["metrics"].Metrics(path, 0).records == [] and path.read_text() == ""
