"""Options of ZeRO that change where things are and when they move, never the numbers."""

from itertools import product

import pytest
import torch

from colossalai.testing import TINY_MODELS
from tests.harness import CaseFailure, run_cases, run_workers
from tests.harness.training import Case, check_close, check_parity, make_plugin, reference, train

MLP, LLA = TINY_MODELS["MLP"], TINY_MODELS["LLA"]

OPTIONS = {
    "cpu_offload": {"cpu_offload": True},
    "overlap_allgather": {"overlap_allgather": True},
    "overlap_all": {"overlap_allgather": True, "overlap_communication": True, "reduce_bucket_size_in_m": 512 / 2**20},
    "small_buckets": {"reduce_bucket_size_in_m": 64 / 2**20, "overlap_communication": False},
    "verbose": {"verbose": True},
    "no_masters": {"master_weights": False},
}


def cases() -> dict[str, Case]:
    table = {}
    for (option, args), stage, (model, micro) in product(OPTIONS.items(), (1, 2), (("MLP", 4), ("LLA-T", 1))):
        table[f"{option}-zero{stage}-{model}"] = Case(
            plugin=f"zero{stage}",
            model=model,
            optimizer="adamw",
            max_norm=0.05,
            micro=micro,
            plugin_args=tuple(args.items()),
        )
    return table


_results: dict = {}


@pytest.mark.parametrize("name", cases())
def test_options_keep_the_numbers(name):
    if not _results:
        _results.update(run_cases(2, train, {each: {"case": case} for each, case in cases().items()}))
    assert not isinstance(_results[name], CaseFailure), str(_results[name])
    check_parity(_results[name], reference(cases()[name]))


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("model, precision", [("MLP", "fp32"), ("LLA", "fp32")])
def test_extra_dp_size_replicates_the_shard_group(stage, model, precision):
    """4 ranks as 2 x 2: states are cut in 2, gradients averaged over all 4."""
    for micro, how in ((1, "plain"), (4, "no_sync")):
        case = Case(
            plugin=f"zero{stage}",
            model=model,
            optimizer="adamw",
            max_norm=0.05,
            micro=micro,
            how=how,
            precision=precision,
            read_grads=(2,),
            plugin_args=(("extra_dp_size", 2),),
        )
        check_parity(run_workers(4, train, case=case), reference(case))


def owned(rank, world_size, extra):
    """Elements whose state this rank keeps."""
    from colossalai.booster import Booster

    booster = Booster(plugin=make_plugin("zero1", extra_dp_size=extra))
    model = LLA.build()
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))
    booster.backward(LLA.loss(model, LLA.batch(0)), optimizer)
    optimizer.step()
    return sum(state["exp_avg"].numel() for state in optimizer.optim.state.values())


def test_states_are_cut_over_the_shard_group():
    total = sum(p.numel() for p in LLA.build().parameters())
    for extra, parts in ((1, 4), (2, 2), (4, 1)):
        mine = run_workers(4, owned, extra=extra)
        assert sum(mine) == total * extra
        assert max(mine) <= total / parts * 1.02 + 64


def read_after_step(rank, world_size, stage):
    """overlap_allgather: whoever looks at the weights before the next forward sees the updated ones."""
    from colossalai.booster import Booster

    booster = Booster(plugin=make_plugin(f"zero{stage}", overlap_allgather=True))
    model = MLP.build()
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    found = []
    for step in range(2):
        booster.backward(MLP.loss(model, MLP.part(MLP.batch(step), rank, world_size)), optimizer)
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            found.append(model.unwrap()(MLP.batch(9)["x"]).detach().clone())
        else:
            found.append({name: value.clone() for name, value in model.state_dict().items()})
    return found


@pytest.mark.parametrize("stage", [1, 2])
def test_overlapped_gather_is_waited_for_by_readers(stage):
    model = MLP.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wanted = []
    for step in range(2):
        MLP.loss(model, MLP.batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(model(MLP.batch(9)["x"]).detach().clone())
    for output, state in run_workers(2, read_after_step, stage=stage):
        assert torch.allclose(output, wanted[0], atol=1e-5)
        state = {name.removeprefix("module."): value for name, value in state.items()}
        check_close("parameters", state, model.state_dict(), 1e-5)
