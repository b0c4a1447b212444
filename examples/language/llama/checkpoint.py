"""One checkpoint of a run in one folder: ``model`` (Hugging Face's layout), ``optimizer``, ``lr_scheduler.bin``, ``state.bin``
and ``arguments.json``, the command line that made it."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from colossalai.booster import Booster

from data import END_OF_TEXT  # isort: skip

PARTS = ("model", "optimizer", "lr_scheduler.bin", "arguments.json", "state.bin")


def save(booster: Booster, folder: str, boosted: tuple, tokenizer: Tokenizer, arguments: dict[str, Any], step: int) -> None:
    """Write ``boosted`` (model, optimizer, scheduler, dataloader) and where the run stands. Every rank calls it.

    The parts are written into ``.partial``. Renaming that to ``.complete`` makes them the checkpoint; then each takes the place
    of the one before it. A job that is killed on the way leaves the old checkpoint or the new one, never parts of both.
    """
    model, optimizer, scheduler, dataloader = boosted
    target, partial = Path(folder), Path(folder) / ".partial"
    if dist.get_rank() == 0:
        _move_into_place(target)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    booster.save_model(model, f"{partial}/model", shard=True, use_safetensors=True)
    booster.save_optimizer(optimizer, f"{partial}/optimizer", shard=True)
    booster.save_lr_scheduler(scheduler, f"{partial}/lr_scheduler.bin")
    booster.save_training_state(f"{partial}/state.bin", dataloader, {"step": step})
    dist.barrier()
    if dist.get_rank() == 0:
        wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT)
        wrapped.save_pretrained(f"{partial}/model")
        (partial / "arguments.json").write_text(json.dumps(arguments, indent=2) + "\n")
        partial.rename(target / ".complete")
        _move_into_place(target)
    dist.barrier()


def _move_into_place(target: Path) -> None:
    """Let what ``.complete`` still holds take the place of the parts before; does nothing without it."""
    complete = target / ".complete"
    if not complete.is_dir():
        return
    for new in complete.iterdir():
        old = target / new.name
        if old.is_dir():
            shutil.rmtree(old)
        new.replace(old)
    complete.rmdir()


def part(folder: str, name: str) -> Path:
    """Where a part of the checkpoint in ``folder`` is."""
    moving = Path(folder) / ".complete" / name
    return moving if moving.exists() else Path(folder) / name


def load(booster: Booster, folder: str, boosted: tuple) -> dict[str, Any]:
    """Set ``boosted`` (model, optimizer, scheduler, dataloader) to what ``folder`` holds; returns {"step": ...}."""
    model, optimizer, scheduler, dataloader = boosted
    booster.load_model(model, str(part(folder, "model")))
    booster.load_optimizer(optimizer, str(part(folder, "optimizer")))
    booster.load_lr_scheduler(scheduler, str(part(folder, "lr_scheduler.bin")))
    return booster.load_training_state(str(part(folder, "state.bin")), dataloader)


def load_tokenizer(folder: str) -> Tokenizer:
    """The tokenizer that was saved with the model."""
    return Tokenizer.from_file(str(part(folder, "model") / "tokenizer.json"))


def arguments(folder: str) -> dict[str, Any]:
    """The command line that made a checkpoint; stops the script if ``folder`` does not hold a whole one."""
    missing = [name for name in PARTS if not part(folder, name).exists()]
    if missing:
        raise SystemExit(f"--resume {folder}: no checkpoint of this script, {', '.join(missing)} is missing")
    return json.loads(part(folder, "arguments.json").read_text())
