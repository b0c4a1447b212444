"""The optimizer's state as one process would have it: whole tensors, ids as in the original optimizer."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from colossalai import comm
from colossalai.tensor import Layout, assemble
from colossalai.utils.errors import CheckpointError

from ..bucket import Slot
from ..repoint import cut_state, cut_tensor

MASTER = "master"
"""State key of the fp32 master of a 16-bit parameter: without it a resumed run would start from rounded weights."""


class ZeroStateMixin:
    """Reading and writing of :class:`LowLevelZeroOptimizer`'s state."""

    # -- for the checkpoint core -------------------------------------------------------------------------------------

    def original_groups(self) -> list[dict]:
        """The param groups with integer ids (positions in the original optimizer) in place of parameters."""
        groups, index = [], 0
        for group, params in zip(self.optim.param_groups, self._original):
            options = {key: value for key, value in group.items() if key != "params"}
            groups.append({**options, "params": list(range(index, index + len(params)))})
            index += len(params)
        return groups

    def checkpoint_entries(self) -> Iterator[tuple[int, Layout, nn.Parameter | None]]:
        """(parameter id, layout, this rank's segment or None) of every trainable parameter, ids ascending."""
        for slot in self._by_index():
            yield slot.index, slot.layout, slot.segment

    def shard_group_of(self, param_id: int):
        """The process group that the parameter is cut over."""
        return self._slot_of(param_id).bucket.group

    def keeps_masters(self, param_id: int) -> bool:
        """Whether the parameter has a master beside the working weight, on whatever rank."""
        return self._slot_of(param_id).bucket.own_master

    def scaler_state(self) -> dict | None:
        return None if self.grad_scaler is None else self.grad_scaler.state_dict()

    def load_scaler_state(self, state: dict | None) -> None:
        if state is not None and self.grad_scaler is not None:
            self.grad_scaler.load_state_dict(state)

    def load_groups(self, groups: list[dict]) -> None:
        """Take over the options (learning rates and the like) of saved groups, in place.

        Raises:
            CheckpointError: where number or sizes of the groups differ.
        """
        found = [len(group["params"]) for group in groups]
        wanted = [len(params) for params in self._original]
        if found != wanted:
            raise CheckpointError(f"the checkpoint has param groups of {found} parameters, the optimizer of {wanted}")
        for group, saved in zip(self.optim.param_groups, groups):
            group.update({key: value for key, value in saved.items() if key != "params"})

    def load_entry(self, param_id: int, state: dict[str, Any]) -> None:
        """Take over the whole state of one parameter: tensors of its shape are cut to this rank's segment."""
        slot = self._slot_of(param_id)
        if slot.segment is None:
            return
        master = state.pop(MASTER, None)
        if master is not None and slot.bucket.own_master:
            slot.segment.data.copy_(cut_tensor(master, slot))
        self.optim.state[slot.segment] = {key: cut_state(key, value, slot) for key, value in state.items()}

    # -- upstream's names --------------------------------------------------------------------------------------------

    def state_dict(self, pinned_state_dicts=None, only_on_master: bool = False) -> dict:
        """``{"state": {id: ...}, "param_groups": [...]}`` with whole tensors on the CPU, as the original optimizer's. Collective.

        Args:
            only_on_master: give an empty ``"state"`` on all ranks but the first.
        """
        state = {param_id: entry for param_id, entry in self._whole_states(only_on_master)}
        return {"state": state, "param_groups": self.original_groups(), "scaler": self.scaler_state()}

    def _whole_states(self, only_on_master: bool) -> Iterator[tuple[int, dict]]:
        ranks = [0] if only_on_master else range(comm.world_size())
        for slot in self._by_index():
            entry = {}
            own = dict(self.optim.state.get(slot.segment, {})) if slot.segment is not None else {}
            if slot.bucket.own_master:
                own[MASTER] = slot.segment
            for key, dtype, value in self._describe_state(own, slot):
                entry[key] = value if dtype is None else self._whole(own.get(key), dtype, slot)
            if (comm.rank() in ranks) and entry:
                yield slot.index, entry

    def _describe_state(self, own: dict, slot: Slot) -> list[tuple[str, torch.dtype | None, Any]]:
        """(key, dtype, None) of each state that is cut, (key, None, value) of the others; known by any rank, told to all."""
        shape = None if slot.segment is None else slot.segment.shape
        mine = []
        for key, value in own.items():
            if isinstance(value, Tensor) and value.shape == shape and key != "step":
                mine.append((key, value.dtype, None))
            else:
                mine.append((key, None, value.detach().cpu().clone() if isinstance(value, Tensor) else value))
        everyone = comm.all_gather_object(mine, group=slot.bucket.group)
        return next((keys for keys in everyone if keys), [])

    @staticmethod
    def _whole(piece: Tensor | None, dtype: torch.dtype, slot: Slot) -> Tensor:
        full = assemble(piece, slot.layout, dtype, slot.bucket.group)
        return comm.broadcast_object(None if full is None else full.cpu(), src=0, group=slot.bucket.group)

    def load_state_dict(self, state_dict: dict) -> None:
        """Take over a whole state (of :meth:`state_dict`, or of the plain optimizer); each rank keeps its segments."""
        self.load_groups(state_dict["param_groups"])
        for slot in self._slots.values():  # a parameter without state in it starts anew
            self.optim.state.pop(slot.segment, None)
        known = {slot.index for slot in self._slots.values()}
        for param_id, entry in state_dict["state"].items():
            if int(param_id) in known:
                self.load_entry(int(param_id), dict(entry))
        self.load_scaler_state(state_dict.get("scaler"))

    def state_dict_shard(
        self, max_shard_size: int = 1024, pinned_state_dicts=None, only_on_master: bool = False
    ) -> Iterator[tuple[dict, float]]:
        """The whole states in parts of at most ``max_shard_size`` MiB: yields ({id: state}, MiB). Collective."""
        block, size = {}, 0.0
        for param_id, entry in self._whole_states(only_on_master):
            more = sum(v.numel() * v.element_size() for v in entry.values() if isinstance(v, Tensor)) / 2**20
            if block and size + more > max_shard_size:
                yield block, size
                block, size = {}, 0.0
            block[param_id] = entry
            size += more
        if block:
            yield block, size

    def update_master_params(self, model: nn.Module | None = None) -> None:
        """Refresh the masters from the working weights, after these were loaded anew."""
        for bucket in self._buckets:
            bucket.pull_master()

    @property
    def working_to_master_param(self) -> dict[int, nn.Parameter]:
        """{id(model parameter): this rank's segment}."""
        return {id(slot.param): slot.segment for slot in self._by_index() if slot.segment is not None}

    @property
    def master_to_working_param(self) -> dict[int, nn.Parameter]:
        return {id(slot.segment): slot.param for slot in self._by_index() if slot.segment is not None}

    @property
    def _master_param_groups_of_current_rank(self) -> dict[int, list[nn.Parameter]]:
        """{group: this rank's segments}; scripts and tests of 0.5 read it."""
        return {number: list(group["params"]) for number, group in enumerate(self.optim.param_groups)}

    def get_working_to_master_map(self) -> dict[int, nn.Parameter]:
        return self.working_to_master_param

    def get_master_to_working_map(self) -> dict[int, nn.Parameter]:
        return self.master_to_working_param

    def _by_index(self) -> list[Slot]:
        return sorted(self._slots.values(), key=lambda slot: slot.index)

    def _slot_of(self, param_id: int) -> Slot:
        slot = next((slot for slot in self._slots.values() if slot.index == param_id), None)
        if slot is None:
            raise CheckpointError(f"parameter id {param_id} is not a trainable parameter of this optimizer")
        return slot
