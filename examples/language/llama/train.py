"""Train a Llama as a model of code on the sources of Python's standard library, or on any folder of text.

python train.py --config tiny --save out                            # one process
torchrun --nproc_per_node 2 train.py --plugin zero1 --save out      # two
torchrun --nproc_per_node 8 train.py --config 7b --tokenizer bpe --plugin zero2 --precision bf16 --grad_checkpoint --save out
python generate.py out/model --prompt "def main("
"""

import argparse
import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from torch.utils.data import DataLoader, Subset
from tqdm import tqdm
from transformers import LlamaForCausalLM

import colossalai
from colossalai.accelerator import get_accelerator
from colossalai.booster import Booster
from colossalai.booster.plugin import (
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    Plugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from colossalai.cluster import DistCoordinator
from colossalai.nn.lr_scheduler import CosineAnnealingWarmupLR
from colossalai.nn.optimizer import HybridAdam

import checkpoint  # isort: skip
from arguments import parse_args  # isort: skip
from configs import llama_config  # isort: skip
from data import BYTE_VOCAB, END_OF_TEXT, Windows, byte_tokenizer, encode, read_texts, train_bpe  # isort: skip
from metrics import Metrics, Speed, plot  # isort: skip


def build_plugin(args: argparse.Namespace) -> Plugin:
    if args.plugin == "ddp":
        return TorchDDPPlugin()
    if args.plugin == "fsdp":
        low = {"bf16": torch.bfloat16}.get(args.precision)
        policy = torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)
        return TorchFSDPPlugin(mixed_precision=policy, sync_module_states=True)
    if args.plugin in ("zero1", "zero2"):
        return LowLevelZeroPlugin(stage=int(args.plugin[-1]), precision=args.precision, max_norm=args.max_norm)
    if args.plugin == "gemini":
        return GeminiPlugin(precision=args.precision, max_norm=args.max_norm)
    return HybridParallelPlugin(tp_size=args.tp, pp_size=1, precision=args.precision, max_norm=args.max_norm)


def use_cores() -> None:
    """Share the cores of a CPU machine between its processes, unless OMP_NUM_THREADS says otherwise."""
    if get_accelerator().name == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))


def build_data(args: argparse.Namespace) -> tuple:
    """(tokenizer, size of the vocabulary, training windows, held-out windows)."""
    train, held_out = read_texts(args.data)
    if args.resume:
        tokenizer = checkpoint.load_tokenizer(args.resume)
    elif args.tokenizer == "byte":
        tokenizer = byte_tokenizer()
    else:  # trained once, since ties may be broken differently elsewhere
        learned = [train_bpe(train, args.vocab_size).to_str() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(learned)
        tokenizer = Tokenizer.from_str(learned[0])
    windows = [Windows(encode(tokenizer, texts, args.tokenizer == "byte"), args.seq_len) for texts in (train, held_out)]
    vocab_size = BYTE_VOCAB if args.tokenizer == "byte" else -(-tokenizer.get_vocab_size() // 64) * 64
    spread = torch.linspace(0, len(windows[1]) - 1, min(args.eval_windows, len(windows[1]))).long().unique()
    return tokenizer, vocab_size, windows[0], Subset(windows[1], spread.tolist())


def build_model(args: argparse.Namespace, vocab_size: int, end_of_text: int) -> tuple:
    """(model, optimizer, schedule of the learning rate); matrices are decayed, norms are not."""
    model = LlamaForCausalLM(llama_config(args.config, vocab_size, args.seq_len, end_of_text))
    model.config.use_cache = False
    if args.grad_checkpoint:
        # transformers 5.24 renames it and warns about the old name
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": args.weight_decay},
        {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = HybridAdam(groups, lr=args.lr, betas=(0.9, 0.95))
    scheduler = CosineAnnealingWarmupLR(optimizer, args.steps, warmup_steps=args.warmup, eta_min=0.1 * args.lr)
    return model, optimizer, scheduler


def endless(loader: DataLoader) -> Iterator[dict[str, torch.Tensor]]:
    """Batches of this epoch and of all that follow; the loader moves from one to the next by itself."""
    device = get_accelerator().get_current_device()
    while True:
        for batch in loader:
            yield {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}


def mean_over_ranks(value: torch.Tensor) -> float:
    value = value.detach().float().clone()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def train_step(booster: Booster, model, optimizer, scheduler, batches, args: argparse.Namespace) -> torch.Tensor:
    """One update from ``grad_accum`` batches of each rank; returns this rank's mean loss."""
    total = torch.zeros((), device=get_accelerator().get_current_device())
    for forward in range(args.grad_accum):
        # Where gradients are sharded, each backward is reduced into the slice that is kept: waiting would keep them whole.
        waits = forward < args.grad_accum - 1 and args.plugin in ("ddp", "zero1")
        with booster.no_sync(model, optimizer) if waits else contextlib.nullcontext():
            loss = model(**next(batches)).loss / args.grad_accum
            booster.backward(loss, optimizer)
        total += loss.detach()
    if args.max_norm and args.plugin in ("ddp", "fsdp"):  # the others clip in step()
        optimizer.clip_grad_by_norm(args.max_norm)
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    return total


@torch.no_grad()
def held_out_loss(model, loader: DataLoader) -> float:
    model.eval()
    device = get_accelerator().get_current_device()
    losses = [model(**{name: t.to(device) for name, t in batch.items()}).loss.float() for batch in loader]
    model.train()
    return mean_over_ranks(torch.stack(losses).mean())


def train(args: argparse.Namespace, booster: Booster, boosted: tuple, held_out, metrics: Metrics, speed: Speed, keep) -> None:
    """Steps until the last; ``keep(step)`` saves."""
    model, optimizer, scheduler, loader = boosted
    step, last = metrics.since, min(args.steps, args.stop_at or args.steps)
    batches = endless(loader)

    def evaluate() -> None:
        metrics.add(step=step, held_out_loss=held_out_loss(model, held_out))

    if step == 0:
        evaluate()
    speed.begin()
    with tqdm(total=last, initial=step, disable=dist.get_rank() != 0, desc="train", dynamic_ncols=True) as bar:
        while step < last:
            loss = train_step(booster, model, optimizer, scheduler, batches, args)
            step += 1
            speed.steps += 1
            bar.update()
            if step % args.log_every == 0 or step == last:
                rates, loss = speed.read(), mean_over_ranks(loss)
                metrics.add(step=step, loss=loss, lr=optimizer.param_groups[0]["lr"], **rates)
                bar.set_postfix_str(
                    f"loss {loss:.3f}, {rates['tokens_per_second']:,.0f} tokens/s, {rates['tflops']:.3g} TFLOPS, "
                    f"{rates['memory_gib']:.2f} GiB"
                )
            if step == last or (args.eval_every and step % args.eval_every == 0):
                evaluate()
                speed.begin()
            if args.save and (step == last or (args.save_every and step % args.save_every == 0)):
                keep(step)
                speed.begin()


def main() -> None:
    args = parse_args(__doc__)
    use_cores()
    colossalai.launch_from_torch(seed=args.seed, verbose=False)
    coordinator = DistCoordinator()
    plugin = build_plugin(args)
    tokenizer, vocab_size, train_set, held_out_set = build_data(args)
    model, optimizer, scheduler = build_model(args, vocab_size, tokenizer.token_to_id(END_OF_TEXT))
    numel, ranks = sum(p.numel() for p in model.parameters()), coordinator.world_size
    tokens_per_step = args.grad_accum * args.batch_size * args.seq_len * ranks
    speed = Speed(model.config, numel, args.seq_len, args.grad_checkpoint, tokens_per_step, ranks)

    shared = {"batch_size": args.batch_size, "seed": args.seed, "num_workers": args.num_workers, "drop_last": True}
    loader = plugin.prepare_dataloader(train_set, shuffle=True, pin_memory=get_accelerator().name != "cpu", **shared)
    held_out = plugin.prepare_dataloader(held_out_set, **shared)
    if not len(loader) or not len(held_out):
        raise SystemExit(f"--batch_size {args.batch_size}: the text has no full batch of --seq_len {args.seq_len} for each rank")

    autocast = args.precision if args.plugin == "ddp" and args.precision != "fp32" else None
    booster = Booster(plugin=plugin, mixed_precision=autocast)
    model, optimizer, _, loader, scheduler = booster.boost(model, optimizer, None, loader, scheduler)
    boosted = (model, optimizer, scheduler, loader)
    step = checkpoint.load(booster, args.resume, boosted)["step"] if args.resume else 0

    coordinator.print_on_master(
        f"{args.config}: {numel / 1e6:.2f} M parameters, {len(train_set) * args.seq_len / 1e6:.1f} M tokens of text, "
        f"{tokens_per_step} a step; {args.plugin}, {args.precision}, {ranks} process(es)"
    )
    path = Path(args.metrics) if args.metrics and coordinator.is_master() else None
    metrics = Metrics(path, step, Path(args.resume, "metrics.jsonl") if args.resume else None)
    begun = time.perf_counter()
    train(args, booster, boosted, held_out, metrics, speed,
          lambda step: checkpoint.save(booster, args.save, boosted, tokenizer, vars(args), step))  # fmt: skip
    steps, losses = metrics.of("held_out_loss")
    coordinator.print_on_master(
        f"held-out loss {losses[-1]:.3f} nats a token after step {steps[-1]}, {losses[0]:.3f} after step {steps[0]}; "
        f"{time.perf_counter() - begun:.0f} s"
    )
    if args.plot and coordinator.is_master():
        plot(metrics, args.plot, "byte" if args.tokenizer == "byte" else "token")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
