"""Time and peak memory of a training step beside torch's own, in one run.

    python benchmarks/step_time.py --dtype fp32 --pairs 9

Two gloo processes of one thread each train the same Llama on the same tokens. Every contestant lives in the same processes and
their steps alternate, so that noise of the machine meets all alike; a ratio is the median over the pairs of ours / peer. Peak
memory (RssAnon + RssShmem, what mapped files do not count in) comes from a fresh pair of processes for each contestant.

Contestants: ours zero1, zero2, ddp and the peers ZeroRedundancyOptimizer (``zro``), FSDP2 with ``reshard_after_forward=False``
(``fsdp2``) and DDP (``torch_ddp``), all with fused AdamW. Under ``--dtype bf16`` the peers keep the state ours keep: fp32 masters
under FSDP2's MixedPrecisionPolicy(bf16, reduce fp32), or fp32 weights under autocast.
"""

import argparse
import gc
import json
import os
import statistics
import threading
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PEERS = {"zero1": "zro", "zero2": "fsdp2", "ddp": "torch_ddp"}


def build_model(args):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 8 // 3 // 32 * 32,
        num_hidden_layers=args.layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=args.seq,
        use_cache=False,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-4, fused=True)


def ours(args, plugin):
    from colossalai.booster import Booster

    booster = Booster(plugin=plugin, mixed_precision="bf16" if args.dtype == "bf16" and not plugin.control_precision() else None)
    model = build_model(args)
    model, optimizer, *_ = booster.boost(model, adamw(model.parameters()))

    def step(batch):
        loss = model(input_ids=batch, labels=batch).loss
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def peer(args, make):
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=args.dtype == "bf16" and make is not fsdp2)
    model, optimizer = make(args)

    def step(batch):
        with autocast:
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def torch_ddp(args):
    model = torch.nn.parallel.DistributedDataParallel(build_model(args), gradient_as_bucket_view=True)
    return model, adamw(model.parameters())


def zro(args):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = torch.nn.parallel.DistributedDataParallel(build_model(args), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.AdamW, parameters_as_bucket_view=True, lr=1e-4, fused=True
    )
    return model, optimizer


def fsdp2(args):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy()
    if args.dtype == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = build_model(args)
    for layer in model.model.layers:
        fully_shard(layer, reshard_after_forward=False, mp_policy=policy)
    fully_shard(model, reshard_after_forward=False, mp_policy=policy)
    return model, adamw(model.parameters())


def contestant(name, args):
    from colossalai.booster.plugin import LowLevelZeroPlugin, TorchDDPPlugin

    if name.startswith("zero"):
        return ours(args, LowLevelZeroPlugin(stage=int(name[-1]), precision=args.dtype))
    if name == "ddp":
        return ours(args, TorchDDPPlugin(gradient_as_bucket_view=True))
    return peer(args, {"zro": zro, "fsdp2": fsdp2, "torch_ddp": torch_ddp}[name])


def resident_bytes():
    """RssAnon + RssShmem of this process."""
    with open("/proc/self/status") as status:
        return sum(int(line.split()[1]) * 1024 for line in status if line.startswith(("RssAnon", "RssShmem")))


class PeakMemory(threading.Thread):
    """Samples this process's memory every few milliseconds."""

    def __init__(self):
        super().__init__(daemon=True)
        self.peak, self.done = 0, threading.Event()

    def run(self):
        while not self.done.wait(0.003):
            self.peak = max(self.peak, resident_bytes())

    def stop(self):
        self.done.set()
        self.join()
        return self.peak


def batches(args, rank):
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, args.vocab, (args.batch, args.seq), generator=generator)


def timed(step, batch):
    dist.barrier()
    start = time.perf_counter()
    step(batch)
    dist.barrier()
    return time.perf_counter() - start


def times_worker(rank, args, names, store, result):
    start_process(rank, args, store)
    steps, batch = {name: contestant(name, args) for name in names}, batches(args, rank)
    for step in steps.values():
        for _ in range(args.warmup):
            step(batch)
    seconds = {name: [] for name in names}
    for pair in range(args.pairs):
        for name in names if pair % 2 == 0 else reversed(names):
            seconds[name].append(timed(steps[name], batch))
    if rank == 0:
        result.put(seconds)
    end_process()


def memory_worker(rank, args, name, store, result):
    start_process(rank, args, store)
    before = resident_bytes()
    watch = PeakMemory()
    watch.start()
    step, batch = contestant(name, args), batches(args, rank)
    for _ in range(3):
        step(batch)
    peak = torch.tensor([watch.stop() - before])
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    if rank == 0:
        result.put(peak.item())
    end_process()


def start_process(rank, args, store):
    import transformers.models.llama.modeling_llama  # noqa: F401

    import colossalai  # noqa: F401  (before the group, as a script would)

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=args.nproc)


def end_process():
    """Give gloo's threads time to drop their tensors: one that does so while the interpreter shuts down aborts the process."""
    dist.destroy_process_group()
    gc.collect()
    time.sleep(0.2)


def run(worker, args, what):
    """The result rank 0 of ``worker`` puts, from a fresh group of processes."""
    result = mp.get_context("spawn").SimpleQueue()
    store = f"/tmp/step_time_{os.getpid()}_{time.time_ns()}"
    context = mp.spawn(worker, (args, what, store, result), args.nproc, join=False)
    while not context.join(timeout=5):  # raises what a worker raised
        pass
    value = result.get()
    return value


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--only", nargs="*", choices=list(PEERS), default=["zero1", "zero2"])
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--what", choices=["all", "time", "memory"], default="all")
    parser.add_argument("--json", help="append the figures to this file, one object a line")
    args = parser.parse_args()
    names = [name for own in args.only for name in (own, PEERS[own])]
    names += ["torch_ddp"] if "torch_ddp" not in names else []
    figures = {"dtype": args.dtype, "pairs": args.pairs, "nproc": args.nproc, "torch": torch.__version__}
    if args.what != "memory":
        seconds = run(times_worker, args, names)
        figures["median_s"] = {name: round(statistics.median(values), 3) for name, values in seconds.items()}
        figures["ratio"] = {
            own: round(statistics.median(a / b for a, b in zip(seconds[own], seconds[PEERS[own]])), 3) for own in args.only
        }
    if args.what != "time":
        figures["peak_MiB"] = {name: round(run(memory_worker, args, name) / 2**20, 1) for name in names}
    report(figures, args)


def report(figures, args):
    for name, value in figures.get("median_s", {}).items():
        print(f"{name:10} {value:8.3f} s a step (median)")
    for own, ratio in figures.get("ratio", {}).items():
        print(f"{own} / {PEERS[own]}: {ratio:.3f} (median of {figures['pairs']} pairs)")
    for name, value in figures.get("peak_MiB", {}).items():
        print(f"{name:10} {value:8.1f} MiB peak over the start")
    if args.json:
        with open(args.json, "a") as out:
            out.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
