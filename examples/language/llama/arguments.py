"""The command line of train.py."""

import argparse

import checkpoint  # isort: skip
from configs import CONFIGS, DEFAULTS  # isort: skip

FIXED = ("config", "tokenizer", "vocab_size", "seq_len")  # a checkpoint fits no other
OF_ONE_RUN = ("resume", "save", "stop_at", "metrics", "plot")  # not taken over by a resumed run


def parse_args(description: str) -> argparse.Namespace:
    """The command line; with ``--resume`` what it leaves out is as it was when the checkpoint was saved."""
    parser = build_parser(description)
    known, _ = parser.parse_known_args()
    saved = checkpoint.arguments(known.resume) if known.resume else {}
    parser.set_defaults(**{name: value for name, value in saved.items() if name not in OF_ONE_RUN})
    args = parser.parse_args()
    for name in FIXED:
        if name in saved and saved[name] != getattr(args, name):
            parser.error(f"--resume {args.resume}: it was trained with --{name} {saved[name]}, not {getattr(args, name)}")
    fill_in(args)
    check(parser, args)
    return args


def build_parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--config", choices=CONFIGS, default="tiny", help="size of the model")
    add("--plugin", choices=("ddp", "fsdp", "zero1", "zero2", "gemini", "3d"), default="zero1", help="how it is spread")
    add("--tp", type=int, default=1, help="ranks that share each layer, with --plugin 3d")
    add("--precision", choices=("fp32", "bf16", "fp16"), default="fp32", help="of the model; the optimizer keeps fp32")
    add("--data", metavar="DIR", help="folder of text files; default: Python's standard library")
    add("--tokenizer", choices=("byte", "bpe"), default="byte", help="tokens are bytes, or byte pairs learned from the text")
    add("--vocab_size", type=int, default=8192, help="of --tokenizer bpe")
    add("--seq_len", type=int, help="tokens of a sequence")
    add("--batch_size", type=int, help="sequences of one forward on one rank")
    add("--grad_accum", type=int, default=1, help="forwards of a step")
    add("--grad_checkpoint", action="store_true", help="compute activations again in backward instead of keeping them")
    add("--steps", type=int, help="length of the run, and of its learning rate schedule")
    add("--stop_at", type=int, help="stop after this step of the run, to --resume later")
    add("--lr", type=float, help="peak learning rate")
    add("--warmup", type=int, help="steps until the peak")
    add("--weight_decay", type=float, default=0.1)
    add("--max_norm", type=float, default=1.0, help="clip gradients to this norm; 0: do not")
    add("--eval_every", type=int, default=100, help="steps between held-out losses; 0: only first and last")
    add("--eval_windows", type=int, default=256, help="held-out sequences to look at")
    add("--log_every", type=int, default=5, help="steps between records of the training loss")
    add("--save", metavar="DIR", help="write a checkpoint there at the end; DIR/model is a Hugging Face folder")
    add("--save_every", type=int, default=0, help="and every so many steps")
    add("--resume", metavar="DIR", help="go on from a checkpoint")
    add("--metrics", metavar="FILE", help="JSON lines; default: DIR/metrics.jsonl of --save")
    add("--plot", metavar="FILE", help="picture of the losses")
    add("--seed", type=int, default=1024)
    add("--num_workers", type=int, default=0, help="processes that read data, for each rank")
    return parser


def fill_in(args: argparse.Namespace) -> None:
    for name, default in zip(("seq_len", "batch_size", "steps", "lr", "warmup"), DEFAULTS[args.config], strict=True):
        if getattr(args, name) is None:
            setattr(args, name, default)
    args.warmup = min(args.warmup, args.steps - 1)
    if args.metrics is None and args.save:
        args.metrics = f"{args.save}/metrics.jsonl"


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    for name in ("seq_len", "batch_size", "grad_accum", "steps", "log_every", "eval_windows", "tp"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1")
    if args.tp > 1 and args.plugin != "3d":
        parser.error("--tp needs --plugin 3d")
    if args.plugin == "fsdp" and args.precision == "fp16":
        parser.error("--plugin fsdp has no loss scaling, which fp16 needs: use --precision bf16, or --plugin zero2")
    if args.save_every and not args.save:
        parser.error("--save_every needs --save DIR")
