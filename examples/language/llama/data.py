"""The text, its tokens and the split: Python's own standard library, or any folder of text files."""

import sysconfig
import zlib
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import Dataset

END_OF_TEXT = "<|endoftext|>"
BYTE_VOCAB = 264  # 256 bytes, the end of a text, and room up to a multiple of 8
HELD_OUT = 20  # one file in so many
SKIPPED = {"site-packages", "test", "tests", "encodings", "pydoc_data", "__pycache__"}  # others' code, tables of data


def read_texts(folder: str | None) -> tuple[list[bytes], list[bytes]]:
    """(training texts, held-out texts), in the order of their paths.

    A file is held out by a hash of its path, so that the split does not move when other files come or go.
    """
    root = Path(folder or sysconfig.get_paths()["stdlib"])
    pattern = "*" if folder else "*.py"
    paths = [path.relative_to(root) for path in root.rglob(pattern) if path.is_file()]
    paths = sorted(path for path in paths if folder or not SKIPPED & set(path.parts))
    split: tuple[list, list] = ([], [])
    for path in paths:
        text = (root / path).read_bytes()
        if b"\0" not in text and text.strip():
            split[zlib.crc32(path.as_posix().encode()) % HELD_OUT == 0].append(text)
    train, held_out = split
    if not train:
        raise SystemExit(f"--data {root}: no text files to train on; give a folder that holds some")
    if not held_out:  # few files: hold out the end of the last one
        cut = len(train[-1]) - len(train[-1]) // HELD_OUT
        train[-1], held_out = train[-1][:cut], [train[-1][cut:]]
    return train, held_out


def byte_tokenizer() -> Tokenizer:
    """A tokenizer whose tokens are bytes, token ``b`` being byte ``b``."""
    symbols = pre_tokenizers.ByteLevel.alphabet()
    # ByteLevel writes a byte as one printable character: itself where it is one, else the next from 256 on.
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    vocab = {chr(byte if byte in printable else next(others)): byte for byte in range(256)}
    if set(vocab) != set(symbols):
        raise RuntimeError("the installed tokenizers library writes bytes in another way; use --tokenizer bpe")
    return _byte_level(Tokenizer(models.BPE(vocab=vocab, merges=[])))


def train_bpe(texts: list[bytes], vocab_size: int) -> Tokenizer:
    """Byte-pair encoding learned from the texts."""
    tokenizer = _byte_level(Tokenizer(models.BPE()))
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text.decode("utf-8", "replace") for text in texts), trainer)
    return tokenizer


def _byte_level(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[bytes], by_bytes: bool) -> np.ndarray:
    """All texts as one stream of token ids, an end of text after each; shape (tokens,), uint16 or uint32."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    if by_bytes:
        pieces = [np.append(np.frombuffer(text, np.uint8).astype(np.uint16), np.uint16(end)) for text in texts]
        return np.concatenate(pieces)
    dtype = np.uint16 if tokenizer.get_vocab_size() <= 2**16 else np.uint32
    encoded = tokenizer.encode_batch([text.decode("utf-8", "replace") for text in texts])
    return np.concatenate([np.array([*piece.ids, end], dtype) for piece in encoded])


class Windows(Dataset):
    """Consecutive windows of ``seq_len`` tokens, each a sample of a causal language model: labels are the inputs."""

    def __init__(self, tokens: np.ndarray, seq_len: int):
        self.tokens = tokens
        self.seq_len = seq_len
        if len(self) == 0:
            raise SystemExit(f"--seq_len {seq_len}: the text has only {len(tokens)} tokens; give more text or a shorter length")

    def __len__(self) -> int:
        return len(self.tokens) // self.seq_len

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = self.tokens[index * self.seq_len : (index + 1) * self.seq_len]
        ids = torch.from_numpy(window.astype(np.int64))
        return {"input_ids": ids, "labels": ids}
