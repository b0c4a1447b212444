"""Model sizes by name."""

from transformers import LlamaConfig

# hidden, intermediate, layers, heads, key-value heads. Parameter counts are without embeddings.
CONFIGS = {
    "tiny": (128, 352, 4, 4, 4),  # 0.8 M
    "20m": (384, 1024, 11, 6, 6),
    "100m": (768, 2048, 14, 12, 12),
    "1b": (2048, 5632, 20, 16, 16),
    "7b": (4096, 11008, 32, 32, 32),
    "13b": (5120, 13824, 40, 40, 40),
    "70b": (8192, 28672, 80, 64, 8),
}

# What a run takes where its flags do not say: sequence length, sequences a step and rank, steps, learning rate, warmup steps.
DEFAULTS = {
    "tiny": (128, 8, 500, 2e-3, 50),
    "20m": (256, 16, 2000, 1e-3, 100),
    "100m": (512, 16, 5000, 6e-4, 200),
    "1b": (2048, 4, 20000, 3e-4, 1000),
    "7b": (4096, 2, 100000, 3e-4, 2000),
    "13b": (4096, 1, 100000, 3e-4, 2000),
    "70b": (4096, 1, 100000, 1.5e-4, 2000),
}


def llama_config(name: str, vocab_size: int, seq_len: int, end_of_text: int) -> LlamaConfig:
    """The Hugging Face configuration of a size; ``end_of_text`` is the token between two files."""
    hidden, intermediate, layers, heads, kv_heads = CONFIGS[name]
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=max(seq_len, 4096),
        bos_token_id=end_of_text,
        eos_token_id=end_of_text,
        pad_token_id=None,
    )
