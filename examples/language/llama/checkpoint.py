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

    It is written beside the checkpoint before and takes its place at the end, so that a job that is killed while writing
    leaves the old one, and never parts of two.
    """
    model, optimizer, scheduler, dataloader = boosted
    target, partial = Path(folder), Path(folder) / ".partial"
    if dist.get_rank() == 0:
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
        # Without state.bin a folder is no checkpoint: it goes first and comes last.
        for name in reversed(PARTS):
            _remove(target / name)
        for name in PARTS:
            (partial / name).rename(target / name)
        partial.rmdir()
    dist.barrier()


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def load(booster: Booster, folder: str, boosted: tuple) -> dict[str, Any]:
    """Set ``boosted`` (model, optimizer, scheduler, dataloader) to what ``folder`` holds; returns {"step": ...}."""
    model, optimizer, scheduler, dataloader = boosted
    booster.load_model(model, f"{folder}/model")
    booster.load_optimizer(optimizer, f"{folder}/optimizer")
    booster.load_lr_scheduler(scheduler, f"{folder}/lr_scheduler.bin")
    return booster.load_training_state(f"{folder}/state.bin", dataloader)


def load_tokenizer(folder: str) -> Tokenizer:
    """The tokenizer that was saved with the model."""
    return Tokenizer.from_file(f"{folder}/model/tokenizer.json")


def arguments(folder: str) -> dict[str, Any]:
    """The command line that made a checkpoint; stops the script if ``folder`` does not hold a whole one."""
    missing = [name for name in PARTS if not (Path(folder) / name).exists()]
    if missing:
        raise SystemExit(f"--resume {folder}: no checkpoint of this script, {', '.join(missing)} is missing")
    return json.loads((Path(folder) / "arguments.json").read_text())
