"""Imported once in the fork server, so that a worker starts in milliseconds."""

import gc
import importlib

import torch
import torch.distributed

# A forked child hangs at its first operation if its parent ever ran one on several threads.
torch.set_num_threads(1)

OPTIONAL = (
    "numpy",
    "pytest",
    "torch.distributed.fsdp",
    "torch.optim._muon",
    "transformers.models.llama.modeling_llama",
    "transformers.models.gpt2.modeling_gpt2",
    "colossalai.testing",
    "colossalai.booster",
    "colossalai.booster.plugin",
)

for _name in OPTIONAL:
    try:
        importlib.import_module(_name)
    except Exception:  # a test that needs it shows the error where it belongs
        pass

gc.collect()
gc.freeze()  # a worker's collections then skip everything loaded here
