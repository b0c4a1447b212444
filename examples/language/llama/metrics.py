"""What a run tells about itself: rates, memory, a file of JSON lines, a picture of the loss."""

import json
import time
from pathlib import Path
from typing import Any

from transformers import LlamaConfig

from colossalai.accelerator import get_accelerator


class Speed:
    """Tokens per second and TFLOPS since it was last asked.

    A training step costs ``k = 3`` forwards' worth of products (forward, and twice that backward), 4 with recomputation:
    ``2 k`` FLOPs for each parameter and token, or by the formula of the Megatron-LM paper (Narayanan et al. 2021, appendix),
    which counts attention and the head apart, ``24 k L H^2 (1 + S / 6H + V / 16LH)`` for each token.

    Args:
        numel: parameters of the whole model.
        seq_len: tokens of a sequence.
        recompute: activations are computed again in backward.
        tokens_per_step: of all ranks.
        ranks: processes that share the work; TFLOPS are those of one.
    """

    def __init__(self, config: LlamaConfig, numel: int, seq_len: int, recompute: bool, tokens_per_step: int, ranks: int):
        layers, hidden, vocab = config.num_hidden_layers, config.hidden_size, config.vocab_size
        k = 4 if recompute else 3
        share = 1 + seq_len / (6 * hidden) + vocab / (16 * layers * hidden)
        self.flop = 2 * k * numel
        self.flop_megatron = 24 * k * layers * hidden**2 * share
        self.tokens_per_step = tokens_per_step
        self.ranks = ranks
        self.begin()

    def begin(self) -> None:
        """Count from now on."""
        self.steps = 0
        self.since = time.perf_counter()

    def read(self) -> dict[str, float]:
        """The rates of the ``steps`` counted since ``begin`` or the last call, and the peak memory of this process in GiB: of
        the accelerator's allocator, on a CPU of the process."""
        rate = self.steps * self.tokens_per_step / (time.perf_counter() - self.since + 1e-12)
        self.begin()
        accelerator = get_accelerator()
        peak = accelerator.max_memory_allocated() or accelerator.max_memory_reserved()
        return {
            "tokens_per_second": rate,
            "tflops": rate * self.flop / self.ranks / 1e12,
            "tflops_megatron": rate * self.flop_megatron / self.ranks / 1e12,
            "memory_gib": peak / 2**30,
        }


class Metrics:
    """Records of a run, one JSON object a line; a resumed run takes the lines up to its step over and adds to them.

    Args:
        path: the file; None keeps the records in memory only. Only one process of a run gives a path.
        since: step to go on from.
        earlier: where the lines up to ``since`` are if ``path`` is a new file.
    """

    def __init__(self, path: Path | None, since: int, earlier: Path | None = None):
        self.since = since
        self.records: list[dict[str, Any]] = []
        earlier = path if path is not None and path.is_file() else earlier
        if since and earlier is not None and earlier.is_file():
            lines = [json.loads(line) for line in earlier.read_text().splitlines() if line.strip()]
            self.records = [record for record in lines if record["step"] <= since]
        self.path = path
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(record) + "\n" for record in self.records))

    def add(self, **record: Any) -> None:
        self.records.append(record)
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(record) + "\n")

    def of(self, name: str) -> tuple[list[int], list[float]]:
        """(steps, values) of the records that have this entry."""
        found = [(record["step"], record[name]) for record in self.records if name in record]
        return [step for step, _ in found], [value for _, value in found]


def plot(metrics: Metrics, path: str, unit: str) -> None:
    """Draw training and held-out loss over the steps."""
    try:
        import matplotlib
    except ImportError as error:
        raise SystemExit('--plot needs matplotlib: pip install "colossalai[plot]"') from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    axes.plot(*metrics.of("loss"), color="#9aa5b1", linewidth=1, label="training")
    axes.plot(*metrics.of("held_out_loss"), color="#d1495b", marker="o", markersize=4, label="held out")
    axes.set(xlabel="step", ylabel=f"loss, nats a {unit}", ylim=(0, None))
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
