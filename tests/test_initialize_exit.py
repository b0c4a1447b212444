"""A job that has done its work ends with exit code 0, whatever the threads of gloo still hold."""

import subprocess
import sys

SCRIPT = """
import torch, colossalai
from torch import nn
from colossalai.booster import Booster
from colossalai.booster.plugin import LowLevelZeroPlugin

colossalai.launch_from_torch(verbose=False)
booster, model = Booster(plugin=LowLevelZeroPlugin(1, "fp32")), nn.Linear(64, 64)
model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(5):
    booster.backward(model(torch.randn(4, 64)).square().mean(), optimizer)
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_finished_job_ends_well(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    for _ in range(2):
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert ended.returncode == 0, ended.stderr[-2000:]
