"""The public face of saving and loading."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Union

from torch import nn
from torch.optim import Optimizer

from colossalai import comm
from colossalai.interface import ModelWrapper, OptimizerWrapper
from colossalai.logging import get_dist_logger
from colossalai.utils.errors import ConfigError

from . import lora, model_io, optimizer_io, training_state
from .file_names import locate_model, locate_optimizer
from .reading import read_torch
from .sources import ModuleSource, optimizer_source
from .staging import SingleFile
from .team import Team
from .writing import Background, plain, save_torch

PathLike = Union[str, "os.PathLike[str]"]


class CheckpointIO:
    """Saves and loads what a plugin made. Every method is collective: all ranks call it, the first one writes.

    Formats are Hugging Face's for models and those of Colossal-AI for optimizers; they do not depend on the plugin,
    nor on the number of ranks. Nothing half-written is ever taken for a checkpoint, and an error is the same on all
    ranks.

    Args:
        model_source: gives the tensors of a model; see :mod:`colossalai.checkpoint_io.sources`.
        optimizer_source: gives the states of an optimizer.
        group: the ranks that call; None is the world.
        alone: every process saves and loads for itself.
        boosted: refuse models and optimizers that no Booster returned.
    """

    def __init__(
        self,
        model_source: Callable[[nn.Module], Any] = ModuleSource,
        optimizer_source: Callable[[Optimizer], Any] = optimizer_source,
        group: Any = None,
        alone: bool = False,
        boosted: bool = True,
    ) -> None:
        self._model_source, self._optimizer_source, self._boosted = model_source, optimizer_source, boosted
        self.team = Team(group, alone)
        self._background = Background()

    # -- models ------------------------------------------------------------------------------------------------------

    def load_model(
        self,
        model: nn.Module,
        checkpoint: PathLike,
        strict: bool = True,
        low_cpu_mem_mode: bool = True,
        num_threads: int = 1,
    ) -> nn.Module:
        """Copy weights into ``model``, which keeps its dtypes; returns it.

        Args:
            checkpoint: a file, an index file, or a directory with an index, ``model.safetensors`` or
                ``pytorch_model.bin``.
            strict: raise where the checkpoint lacks tensors of the model or has others, else warn.
            low_cpu_mem_mode: map files into memory; else read them ahead into memory.
            num_threads: that read ahead.

        Raises:
            CheckpointError: where there is no such checkpoint, or it is damaged, or does not fit.
            ConfigError: where a directory has several index files.
        """
        self._check_model(model)
        if not self._start("load_model", checkpoint, strict=strict):
            return model
        sharded, path = self._locate(locate_model, checkpoint)
        load = self.load_sharded_model if sharded else self.load_unsharded_model
        load(model, path, strict, low_cpu_mem_mode, num_threads)
        return model

    def save_model(
        self,
        model: nn.Module,
        checkpoint: PathLike,
        shard: bool = False,
        gather_dtensor: bool = True,
        prefix: str | None = None,
        size_per_shard: int = 1024,
        use_safetensors: bool = False,
        use_async: bool = False,
    ) -> None:
        """Write the weights in their working dtype.

        Args:
            checkpoint: a directory with ``shard``, else a file.
            shard: write shards of ``size_per_shard`` MiB with an index and, for Hugging Face models, their
                configuration.
            gather_dtensor: only True: what is written is always whole tensors.
            prefix: infix of the file names of shards.
            use_safetensors: else torch files. A single file must end in ``.safetensors``, and one that does is
                written so.
            use_async: copy the tensors and write them, as safetensors, while training goes on. The next call waits
                for the files and raises if writing them failed.

        Raises:
            CheckpointError: where writing fails; what was at ``checkpoint`` before stays readable.
        """
        self._check_model(model)
        options = dict(shard=shard, prefix=prefix, size_per_shard=size_per_shard, use_safetensors=use_safetensors)
        if not self._start("save_model", checkpoint, **options, use_async=use_async):
            return
        if not self._check_save(checkpoint, shard, gather_dtensor, prefix, size_per_shard):
            return
        if shard:
            self.save_sharded_model(
                model, checkpoint, gather_dtensor, prefix, size_per_shard, use_safetensors or use_async, use_async
            )
        else:
            self.save_unsharded_model(model, checkpoint, gather_dtensor, use_safetensors or use_async, use_async)

    def load_sharded_model(
        self,
        model: nn.Module,
        index_file_path: PathLike,
        strict: bool = False,
        low_cpu_mem_mode: bool = True,
        num_threads: int = 1,
    ) -> None:
        """The part of :meth:`load_model` for an index file."""
        source = self._model_source(model)
        model_io.load(source, self.team, Path(index_file_path), True, strict, low_cpu_mem_mode, num_threads)

    def load_unsharded_model(
        self,
        model: nn.Module,
        checkpoint: PathLike,
        strict: bool = True,
        low_cpu_mem_mode: bool = True,
        num_threads: int = 1,
    ) -> None:
        """The part of :meth:`load_model` for a single file."""
        source = self._model_source(model)
        model_io.load(source, self.team, Path(checkpoint), False, strict, low_cpu_mem_mode, num_threads)

    def save_sharded_model(
        self,
        model: nn.Module,
        checkpoint: PathLike,
        gather_dtensor: bool = True,
        prefix: str | None = None,
        size_per_shard: int = 1024,
        use_safetensors: bool = False,
        use_async: bool = False,
    ) -> None:
        """The part of :meth:`save_model` for ``shard=True``."""
        background = self._background if use_async else None
        model_io.save_sharded(
            self._model_source(model), self.team, Path(checkpoint), prefix, size_per_shard, use_safetensors, background
        )

    def save_unsharded_model(
        self,
        model: nn.Module,
        checkpoint: PathLike,
        gather_dtensor: bool = True,
        use_safetensors: bool = False,
        use_async: bool = False,
    ) -> None:
        """The part of :meth:`save_model` for ``shard=False``."""
        use_safetensors = _single_file_format(checkpoint, use_safetensors, "use_safetensors=True or use_async=True")
        background = self._background if use_async else None
        model_io.save_unsharded(self._model_source(model), self.team, Path(checkpoint), use_safetensors, background)

    # -- optimizers --------------------------------------------------------------------------------------------------

    def load_optimizer(
        self,
        optimizer: Optimizer,
        checkpoint: PathLike,
        prefix: str | None = None,
        low_cpu_mem_mode: bool = True,
        num_threads: int = 1,
    ) -> None:
        """Take over states, learning rates and the other options of the param groups, and the loss scale.

        Load the model first: masters that the checkpoint does not have are made from its weights.

        Args:
            checkpoint: a file, an index file, or a directory with an index.
            prefix: that the shards were saved with, where the directory has several.

        Raises:
            CheckpointError: where there is no such checkpoint, or it is damaged.
            ConfigError: (a ValueError) for a directory without index, or where number or sizes of param groups differ.
        """
        self._check_optimizer(optimizer)
        if not self._start("load_optimizer", checkpoint, prefix=prefix):
            return
        sharded, path = self._locate(lambda place: locate_optimizer(place, prefix), checkpoint)
        if sharded:
            self.load_sharded_optimizer(optimizer, path, prefix, low_cpu_mem_mode, num_threads)
        else:
            self.load_unsharded_optimizer(optimizer, path, low_cpu_mem_mode, num_threads)

    def save_optimizer(
        self,
        optimizer: Optimizer,
        checkpoint: PathLike,
        shard: bool = False,
        gather_dtensor: bool = True,
        prefix: str | None = None,
        size_per_shard: int = 1024,
        use_async: bool = False,
    ) -> None:
        """Write the whole state of every parameter under its position in the original optimizer.

        With 16-bit weights the fp32 masters are written too, as the state ``master``, so that a resumed run continues
        exactly. The arguments are those of :meth:`save_model`.
        """
        self._check_optimizer(optimizer)
        options = dict(shard=shard, prefix=prefix, size_per_shard=size_per_shard, use_async=use_async)
        if not self._start("save_optimizer", checkpoint, **options):
            return
        if not self._check_save(checkpoint, shard, gather_dtensor, prefix, size_per_shard):
            return
        if shard:
            self.save_sharded_optimizer(optimizer, checkpoint, gather_dtensor, prefix, size_per_shard, use_async)
        else:
            self.save_unsharded_optimizer(optimizer, checkpoint, gather_dtensor, use_async)

    def load_sharded_optimizer(
        self,
        optimizer: Optimizer,
        index_file_path: PathLike,
        prefix: str | None = None,
        low_cpu_mem_mode: bool = True,
        num_threads: int = 1,
    ) -> None:
        """The part of :meth:`load_optimizer` for an index file, whose names have the ``prefix`` already."""
        source = self._optimizer_source(optimizer)
        optimizer_io.load(source, self.team, Path(index_file_path), True, low_cpu_mem_mode, num_threads)

    def load_unsharded_optimizer(
        self, optimizer: Optimizer, checkpoint: PathLike, low_cpu_mem_mode: bool = True, num_threads: int = 1
    ) -> None:
        """The part of :meth:`load_optimizer` for a single file."""
        source = self._optimizer_source(optimizer)
        optimizer_io.load(source, self.team, Path(checkpoint), False, low_cpu_mem_mode, num_threads)

    def save_sharded_optimizer(
        self,
        optimizer: Optimizer,
        checkpoint: PathLike,
        gather_dtensor: bool = True,
        prefix: str | None = None,
        size_per_shard: int = 1024,
        use_async: bool = False,
    ) -> None:
        """The part of :meth:`save_optimizer` for ``shard=True``."""
        background = self._background if use_async else None
        source = self._optimizer_source(optimizer)
        optimizer_io.save_sharded(source, self.team, Path(checkpoint), prefix, size_per_shard, background)

    def save_unsharded_optimizer(
        self, optimizer: Optimizer, checkpoint: PathLike, gather_dtensor: bool = True, use_async: bool = False
    ) -> None:
        """The part of :meth:`save_optimizer` for ``shard=False``."""
        use_safetensors = _single_file_format(checkpoint, use_async, "use_async=True")
        background = self._background if use_async else None
        source = self._optimizer_source(optimizer)
        optimizer_io.save_unsharded(source, self.team, Path(checkpoint), use_safetensors, background)

    # -- the rest of a run -------------------------------------------------------------------------------------------

    def save_lr_scheduler(self, lr_scheduler: Any, checkpoint: PathLike) -> None:
        """Write the scheduler's ``state_dict``."""
        if not self._start("save_lr_scheduler", checkpoint):
            return
        with self.team.on_writer() as writes:
            if writes:
                file = SingleFile(Path(checkpoint))
                try:
                    save_torch(plain(lr_scheduler.state_dict()), file.path(""))
                    file.publish()
                except BaseException:
                    file.discard()
                    raise

    def load_lr_scheduler(self, lr_scheduler: Any, checkpoint: PathLike) -> None:
        """Load what :meth:`save_lr_scheduler` wrote."""
        if not self._start("load_lr_scheduler", checkpoint):
            return
        error = None
        try:
            lr_scheduler.load_state_dict(read_torch(checkpoint, map_memory=False))
        except Exception as caught:
            error = caught
        self.team.share_all(error)

    def save_training_state(self, path: PathLike, dataloader: Any = None, extra: dict | None = None) -> None:
        """Write what a resumed run needs beside model, optimizer and scheduler.

        Args:
            path: of one file.
            dataloader: its ``state_dict()`` is kept: the place in the data.
            extra: step counters and the like: plain values and tensors.
        """
        if self._start("save_training_state", path):
            training_state.save_training_state(self.team, Path(path), dataloader, extra)

    def load_training_state(self, path: PathLike, dataloader: Any = None) -> dict:
        """Set random numbers and the place in the data to those of :meth:`save_training_state`; returns ``extra``."""
        if not self._start("load_training_state", path):
            return {}
        return training_state.load_training_state(self.team, Path(path), dataloader)

    def save_lora_as_pretrained(
        self, model: nn.Module, checkpoint: PathLike, use_safetensors: bool = False, state_dict: dict | None = None
    ) -> None:
        """Write the adapters of a peft model as ``PeftModel.save_pretrained`` does.

        Args:
            checkpoint: a directory.
            state_dict: whole tensors under the peft model's names, in place of the model's own.
        """
        self._check_model(model)
        lora.peft_model_of(model)
        if not self._start("save_lora_as_pretrained", checkpoint, use_safetensors=use_safetensors):
            return
        lora.save_adapters(model, self.team, Path(checkpoint), use_safetensors, state_dict)

    # -- asynchronous saves ------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Return when asynchronous saves need the weights no more: at once, as a save copies them before it returns."""

    def _sync_d2h(self) -> None:
        self.synchronize()

    def _sync_io(self) -> None:
        """Return when asynchronous saves of this rank are on the disk; raises where writing failed. Not collective."""
        error = self._background.wait()
        if error is not None:
            raise error

    # -- checks ------------------------------------------------------------------------------------------------------

    def _start(self, call: str, checkpoint: PathLike, **arguments: Any) -> bool:
        """All ranks came with the same arguments, and no earlier save failed; False in a fake world."""
        if comm.is_fake():
            self.team.warn(f"{call} does nothing in a fake world, which has no weights: {os.fspath(checkpoint)}")
            return False
        self.team.assemble(call, checkpoint=os.fspath(checkpoint), **arguments)
        self.team.share(self._background.wait())
        return True

    def _locate(self, locate: Callable[[PathLike], tuple[bool, Path]], checkpoint: PathLike) -> tuple[bool, Path]:
        with self.team.on_writer() as writes:  # it may have to finish what a killed save left
            if writes:
                locate(checkpoint)
        error, found = None, None
        try:
            found = locate(checkpoint)
        except Exception as caught:
            error = caught
        self.team.share_all(error)
        return found

    def _check_save(
        self, checkpoint: PathLike, shard: bool, gather_dtensor: bool, prefix: str | None, size_per_shard: float
    ) -> bool:
        if not size_per_shard > 0:
            raise ConfigError(f"size_per_shard={size_per_shard} must be a positive number of MiB")
        if not gather_dtensor:
            self.team.warn("gather_dtensor=False has no effect: checkpoints hold whole tensors")
        if prefix and not shard:
            self.team.warn(f"prefix={prefix!r} has no effect without shard=True: the file is called {checkpoint}")
        if self.team.first(self.team.writes and shard and Path(checkpoint).is_file()):
            if self.team.writes:
                get_dist_logger().error(f"nothing was saved: shard=True needs a directory, and {checkpoint} is a file")
            return False
        return True

    def _check_model(self, model: nn.Module) -> None:
        if self._boosted and not isinstance(model, ModelWrapper):
            raise ConfigError("Please boost the model before saving or loading it: booster.boost(model, ...) returns it")

    def _check_optimizer(self, optimizer: Optimizer) -> None:
        if self._boosted and not isinstance(optimizer, OptimizerWrapper):
            raise ConfigError("Please boost the optimizer before saving or loading it: booster.boost returns it")


def _single_file_format(checkpoint: PathLike, use_safetensors: bool, because: str) -> bool:
    """Whether a single file is safetensors: by its suffix, which must fit what was asked."""
    fits = os.fspath(checkpoint).endswith(".safetensors")
    if use_safetensors and not fits:
        raise ConfigError(f"{because} writes a safetensors file: checkpoint={os.fspath(checkpoint)!r} must end in .safetensors")
    return fits
