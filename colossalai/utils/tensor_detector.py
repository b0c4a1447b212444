"""Which tensors are alive, for hunting memory."""

import gc
from collections import defaultdict

import torch
from torch import nn

from ..accelerator import get_accelerator


class TensorDetector:
    """Lists the tensors that came and went between two calls of ``detect``.

    Args:
        show_info: print the report.
        log: a file the report is written to instead of the screen, anew at each call.
        include_cpu: look at tensors in host memory too.
        module: its parameters, and their gradients, are called by their names.
    """

    def __init__(
        self,
        show_info: bool = True,
        log: str | None = None,
        include_cpu: bool = False,
        module: nn.Module | None = None,
    ) -> None:
        self.show_info = show_info
        self.log = log
        self.include_cpu = include_cpu
        self.module = module
        self._seen: dict[int, str] = {}

    def _describe(self, include_cpu: bool) -> dict[int, str]:
        names: dict[int, str] = {}
        for name, param in self.module.named_parameters() if self.module is not None else ():
            names[id(param)] = name
            if param.grad is not None:
                names[id(param.grad)] = f"{name}.grad"
        found: dict[int, str] = {}
        for thing in gc.get_objects():
            if not issubclass(type(thing), torch.Tensor) or (thing.device.type == "cpu" and not include_cpu):
                continue
            nbytes = thing.numel() * thing.element_size()
            found[id(thing)] = (
                f"{names.get(id(thing), type(thing).__name__)}: {thing.device}, "
                f"{str(thing.dtype).removeprefix('torch.')}, shape {tuple(thing.shape)}, "
                f"grad {thing.requires_grad}, {nbytes} bytes"
            )
        return found

    @staticmethod
    def _section(sign: str, lines: list[str]) -> list[str]:
        counts: dict[str, int] = defaultdict(int)
        for line in lines:
            counts[line] += 1
        return [f"{sign} {count} x {line}" for line, count in sorted(counts.items())]

    def detect(self, include_cpu: bool = False) -> str:
        """Report what is alive now (``+`` new, ``-`` gone since the last call) and give the report back."""
        found = self._describe(include_cpu or self.include_cpu)
        # Ids are used again by Python: an entry counts as the same tensor only while its description is.
        new = [text for key, text in found.items() if self._seen.get(key) != text]
        gone = [text for key, text in self._seen.items() if found.get(key) != text]
        accelerator = get_accelerator()
        lines = [
            *self._section("+", new),
            *self._section("-", gone),
            f"= {len(found)} tensors; {accelerator.name} memory allocated {accelerator.memory_allocated()} bytes, "
            f"peak {accelerator.max_memory_allocated()} bytes",
        ]
        report = "\n".join(lines)
        self._seen = found
        if self.log is not None:
            with open(self.log, "w", encoding="utf-8") as file:
                file.write(report + "\n")
        elif self.show_info:
            print(report)
        return report

    def close(self) -> None:
        """Forget what was seen."""
        self._seen.clear()
